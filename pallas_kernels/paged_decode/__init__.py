"""Attention over a paged cache whose kv heads keep different numbers of entries.

api: the op. xla, tpu, gpu (Triton), hopper (Mosaic GPU): its implementations; stream_k: work sharing of GPU programs;
chunked: many query tokens; selection: some pages only; plane: biases and scales of entries. append, tpu_append:
writing a decoded token. supported: checks of arguments. reference: the definition.
"""

from pallas_kernels.paged_decode.api import paged_decode, paged_decode_append
from pallas_kernels.paged_decode.append import Append

__all__ = ["Append", "paged_decode", "paged_decode_append"]
