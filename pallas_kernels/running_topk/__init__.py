"""The running top-k: which keys a cache of the k best keys drops, and when.

api: the op. xla (a wavelet tree), counts (two levels of counts), tpu, gpu: its implementations. fenwick: the tree of
tpu and gpu. reference: the definition.
"""

from pallas_kernels.running_topk.api import ranks, running_topk

__all__ = ["ranks", "running_topk"]
