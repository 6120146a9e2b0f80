"""Fast KVzip (Kim, Han and Yun, 2026, arXiv:2601.17668): gates that predict KVzip's scores from a token's hidden state.

gate: the network and the paper's alternatives to it. policy: the eviction. files: exported and published gates.
"""

from kvjax.policies.eviction.fast_kvzip.files import load_gates, save_gates
from kvjax.policies.eviction.fast_kvzip.gate import FORMS, INPUTS, SinkGate, inputs
from kvjax.policies.eviction.fast_kvzip.policy import FastKVzip

__all__ = ["FORMS", "INPUTS", "FastKVzip", "SinkGate", "inputs", "load_gates", "save_gates"]
