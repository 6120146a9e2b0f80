"""A TPU's vector memory: which groups of query heads fit."""

from pallas_kernels.supported import require

LANES = 128
STATISTICS = 1 << 9
"""Bytes of a query beside its numbers: what is known of it stands in whole lanes of float32."""
USUAL = 1 << 13
"""Bytes of a group's queries of one token, up to which kernels fit into the 16 MiB that they are given anyway."""
MOST = 7 << 13
"""Up to which they fit into `LIMIT`."""
LIMIT = 56 << 20
"""Of the 64 MiB that v5p and v7x have; v5e and v6e have twice as many."""


def query_bytes(head_dim: int, itemsize: int) -> int:
    """A query fills whole lanes."""
    return max(head_dim, LANES) * itemsize


def vmem_limit(op: str, group: int, head_dim: int, itemsize: int) -> int | None:
    """What a kernel asks for whose tiles hold a whole group; None: what it is given anyway. ValueError for a group that
    does not fit."""
    one = query_bytes(head_dim, itemsize) + STATISTICS
    what = f"at most {MOST // one} query heads a kv head at this head_dim and dtype, not {group}"
    require(op, "tpu", (group * one <= MOST, what))
    return None if group * one <= USUAL else LIMIT
