"""KVPOP: a cache of constant size whose entries are chosen by how much attention they will get (workshop paper
on token eviction guided by an xLSTM).

An mLSTM per kv head reads keys and values as they come and scores each token once, as late as can be, before it leaves
the window; the best scores so far stay. The whole model is trained to live with that.

scorer: the network. policy: the admission. files: exported scorers.
"""

from kvjax.policies.admission.kvpop.files import load_scorers, save_scorers
from kvjax.policies.admission.kvpop.policy import KVPOP
from kvjax.policies.admission.kvpop.scorer import Scorer, Sizes

__all__ = ["KVPOP", "Scorer", "Sizes", "load_scorers", "save_scorers"]
