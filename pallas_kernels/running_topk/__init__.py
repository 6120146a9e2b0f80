"""The running top-k: the keys that a cache of the best k drops, and when it drops them.

api: the op. xla (a wavelet tree), counts (two levels of counts), tpu, gpu: its implementations; fenwick: the tree of
the last two. reference: the definition.
"""

from pallas_kernels.running_topk.api import ranks, running_topk

__all__ = ["ranks", "running_topk"]
