"""The running top-k: which keys a cache that keeps the best k drops, and when.

api: the op. xla (a wavelet tree), counts (two levels of counts), tpu, gpu: its implementations; fenwick: the tree of
the last two. reference: what the op means.
"""

from pallas_kernels.running_topk.api import ranks, running_topk

__all__ = ["ranks", "running_topk"]
