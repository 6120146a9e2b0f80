"""KVzap (Jégou and Jeblick, 2026, arXiv:2601.07891): a network predicts a token's KVzip+ score from the layer's input,
and the token stays if this reaches a threshold."""

from kvjax.policies.admission.kvzap.files import load_gates, save_gates
from kvjax.policies.admission.kvzap.gate import Surrogate
from kvjax.policies.admission.kvzap.policy import KVzap

__all__ = ["KVzap", "Surrogate", "load_gates", "save_gates"]
