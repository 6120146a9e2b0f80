"""Fast KVzip (Kim, Han and Yun, 2026, arXiv:2601.17668): gates that say from a token's hidden state how much its entry
would be looked at if the context were repeated, distilled from KVzip's scores.

gate: the network and the paper's alternatives to it. files: exported and published gates.
"""

from kvjax.policies.eviction.fast_kvzip.files import load_gates, save_gates
from kvjax.policies.eviction.fast_kvzip.gate import FORMS, INPUTS, SinkGate, inputs

__all__ = ["FORMS", "INPUTS", "SinkGate", "inputs", "load_gates", "save_gates"]
