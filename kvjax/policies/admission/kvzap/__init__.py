"""KVzap (Jégou and Jeblick, 2026, arXiv:2601.07891): a network predicts KVzip+'s score of a token from the layer's
input, and the token stays if the prediction reaches a threshold."""

from kvjax.policies.admission.kvzap.files import load_gates, save_gates
from kvjax.policies.admission.kvzap.gate import Surrogate
from kvjax.policies.admission.kvzap.policy import KVzap

__all__ = ["KVzap", "Surrogate", "load_gates", "save_gates"]
