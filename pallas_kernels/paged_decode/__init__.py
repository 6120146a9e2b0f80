"""Attention over a paged cache in which every kv head keeps its own number of entries. See `api.py`."""

from pallas_kernels.paged_decode.api import paged_decode

__all__ = ["paged_decode"]
