"""Limits of a TPU's vector memory (VMEM) on the group of query heads."""

from pallas_kernels.supported import require

LANES = 128
STATISTICS = 1 << 9
"""Bytes per query besides the query itself: its statistics take whole lanes of float32."""
USUAL = 1 << 13
"""Most bytes of a group's queries of one token for which kernels fit into the default limit of 16 MiB."""
MOST = 7 << 13
"""Most bytes of a group's queries of one token for which kernels fit into `LIMIT`."""
LIMIT = 56 << 20
"""Bytes requested for larger groups. v5p and v7x have 64 MiB of VMEM, v5e and v6e 128 MiB."""


def query_bytes(head_dim: int, itemsize: int) -> int:
    """The bytes of a query, padded to whole lanes."""
    return max(head_dim, LANES) * itemsize


def vmem_limit(op: str, group: int, head_dim: int, itemsize: int) -> int | None:
    """The VMEM limit in bytes of a kernel whose tiles hold a whole group. None: the default limit is enough.

    Raises ValueError for a group that does not fit.
    """
    one = query_bytes(head_dim, itemsize) + STATISTICS
    what = f"at most {MOST // one} query heads a kv head at this head_dim and dtype, not {group}"
    require(op, "tpu", (group * one <= MOST, what))
    return None if group * one <= USUAL else LIMIT
