"""Attention over a local window plus, for each kv head, the keys that were kept. See `api.py`."""

from pallas_kernels.vertical_slash.api import vertical_slash
from pallas_kernels.vertical_slash.causal import SAVED

__all__ = ["SAVED", "vertical_slash"]
