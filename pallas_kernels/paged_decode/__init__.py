"""Attention over a paged cache in which every kv head keeps its own number of entries.

api: the op. xla, tpu, gpu (Triton), hopper (Mosaic GPU): its implementations; stream_k: how GPU programs share rows;
chunked: many query tokens; selection: some pages only; plane: biases of entries. supported: what the kernels take.
reference: what the op means.
"""

from pallas_kernels.paged_decode.api import paged_decode

__all__ = ["paged_decode"]
