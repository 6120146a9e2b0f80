"""The limit that a TPU's vector memory (VMEM) sets on the number of query heads per kv head."""

from pallas_kernels.supported import require

LANES = 128
STATISTICS = 1 << 9
"""Bytes per query besides the query itself: its statistics take whole lanes of float32."""
DEFAULT_MOST = 1 << 13
"""The most bytes of a group's queries of one token with which kernels fit into the default limit of 16 MiB."""
MOST = 7 << 13
"""The most bytes of a group's queries of one token with which kernels fit into `LIMIT`."""
LIMIT = 56 << 20
"""Bytes requested for larger groups. v5p and v7x have 64 MiB of VMEM, v5e and v6e 128 MiB."""


def query_bytes(head_dim: int, itemsize: int) -> int:
    """Return the bytes of a query, padded to whole lanes."""
    return max(head_dim, LANES) * itemsize


def vmem_limit(op: str, group: int, head_dim: int, itemsize: int) -> int | None:
    """Return the VMEM limit in bytes of a kernel whose tiles hold a whole group. None: the default limit is enough.

    Raises ValueError for a group that does not fit.
    """
    per_query = query_bytes(head_dim, itemsize) + STATISTICS
    requirement = f"at most {MOST // per_query} query heads a kv head at this head_dim and dtype, not {group}"
    require(op, "tpu", (group * per_query <= MOST, requirement))
    return None if group * per_query <= DEFAULT_MOST else LIMIT
