"""Attention over a local window and, for each kv head, the keys that were kept.

api: the op. key_lists: the lists of keys that kernels read. xla (with xla_walk), tpu, gpu (Triton), hopper (Mosaic
GPU): forward. tpu_gather: the far list. tpu_walk, gpu_walk: the walk over tiles. tpu_backward, gpu_backward, vjp: the
gradient. reference: the definition.
"""

from pallas_kernels.vertical_slash.api import FOREVER, ends, vertical_slash
from pallas_kernels.vertical_slash.vjp import SAVED

__all__ = ["FOREVER", "SAVED", "ends", "vertical_slash"]
