"""KVPOP: a cache of constant size that keeps the entries with the most predicted attention (workshop paper on token
eviction guided by an xLSTM).

An mLSTM per kv head reads keys and values as they come. It scores each token once, as late as possible before the token
leaves the window, and the tokens with the best scores so far stay. The whole model is trained with this cache.

scorer: the network. policy: the admission. files: exported scorers.
"""

from kvjax.policies.admission.kvpop.files import load_scorers, save_scorers
from kvjax.policies.admission.kvpop.policy import KVPOP
from kvjax.policies.admission.kvpop.scorer import Scorer, Sizes

__all__ = ["KVPOP", "Scorer", "Sizes", "load_scorers", "save_scorers"]
