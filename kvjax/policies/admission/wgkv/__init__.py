"""WG-KV: a learned write gate decides which tokens outlive the local window (Huang et al., "KV Admission").

The gate of a kv head looks at a token's key before and after RoPE, and predicts how much the token will be needed once
it has left the window. In training the gate is soft: a query at distance ≥ window adds log g to the logit. Afterwards
it is hard: a token is retained iff g ≥ τ.

gate: the network. policy: the admission. soft: what is trained. files: exported gates.
"""

from kvjax.policies.admission.wgkv.files import load_gates, save_gates
from kvjax.policies.admission.wgkv.gate import WriteGate
from kvjax.policies.admission.wgkv.policy import WGKV
from kvjax.policies.admission.wgkv.soft import GATE_FLOOR, WriteGateTraining

__all__ = [
    "GATE_FLOOR",
    "WGKV",
    "WriteGate",
    "WriteGateTraining",
    "load_gates",
    "save_gates",
]
