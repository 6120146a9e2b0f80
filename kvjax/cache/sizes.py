"""How large a pool is: capacities as people state them, and what is expected where none is stated."""

import math
import os

import jax
import numpy as np
from einops import rearrange
from jaxtyping import Float

from kvjax.cache.ring import ring_pages
from kvjax.errors import UserError, whole_number
from kvjax.mesh import SHARDS, axis_size

MARGIN = 1.25
"""How much larger than the policy's expected need the default pool is (never larger than the full cache)."""


class CapacityError(UserError):
    """The pool is too small for what the policy keeps of these tokens."""


def _device_bytes() -> int:
    """Memory of one device; of the host, divided among its virtual devices, where the device does not say."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()


def rounded_up(number: int) -> int:
    """The number, or up to a sixteenth more: contexts of about one length get tables and pools of one size, and run
    the programs that were compiled for the first of them."""
    step = 1 << max(0, number.bit_length() - 5)
    return -(-number // step) * step


def parse_capacity(text: str) -> int | str:
    """A capacity as written on a command line: `4096` entries per kv head, `2GiB`, or `30%` of a device's memory."""
    return int(text) if text.isdigit() else text


def pages_for(
    capacity: int | str | None,
    *,
    expected: Float[np.ndarray, "#l #k"],
    window: int,
    tokens: int,
    rows: tuple[int, int, int],
    page_size: int,
    page_bytes: int,
) -> int:
    """Pages of one shard's pool.

    Args:
        capacity: entries per kv head on average (an int), bytes of all shards together ("2GiB", "500MB"), a share of
            each device's memory ("30%"), or None: what is expected with a margin.
        expected: the most entries at one time, ring included, by layer and kv head.
        tokens: the longest sequence, prompt and new tokens.
        rows: layers, sequences of one shard, kv heads of the whole model.
        page_bytes: of a page with what stands beside its entries.
    """
    layers, batch, heads = rows
    tensor = axis_size("tensor")
    local_rows = layers * batch * heads // tensor
    ring = ring_pages(window, page_size)
    if capacity is None:
        need = np.minimum(expected * MARGIN, tokens)
        held = np.maximum(need - min(tokens, window - 1), 0)
        # a mean says little of one row: each may have a page more, as long as there are tokens for it
        most = -(-max(tokens - window + 1, 0) // page_size)
        pages = ring + np.minimum(np.ceil(held / page_size) + (held > 0), most)
        return max(1, batch * largest_shard(np.broadcast_to(pages, (layers, heads)), tensor))
    if not isinstance(capacity, str):
        what = "capacity (entries per kv head, bytes as 2GiB or a share as 30%)"
        pages = -(-whole_number("cache", what, capacity, most=2**62) * local_rows // page_size)
    elif capacity.endswith("%"):
        pages = int(_number(capacity[:-1], capacity) / 100 * _device_bytes()) // page_bytes
    else:
        units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
        unit = next((u for u in units if capacity.endswith(u)), None)
        if unit is None:
            raise UserError(
                f"capacity {capacity!r}: expected entries per kv head (4096), bytes (2GiB) or a share (30%)"
            )
        pages = int(_number(capacity[: -len(unit)], capacity) * units[unit]) // (
            page_bytes * axis_size(*SHARDS)
        )
    if pages < local_rows * max(ring, 1):
        raise CapacityError(
            f"capacity {capacity}: {pages} pages of {page_size} tokens a device are fewer than the "
            f"{local_rows * max(ring, 1)} that the windows of {local_rows} (layer, sequence, kv head) rows take"
        )
    return min(pages, local_rows * (ring + -(-tokens // page_size)))


def largest_shard(pages: Float[np.ndarray, "l k"], shards: int) -> int:
    """The pages of the one of `shards` shards of the kv heads that has most."""
    return int(rearrange(pages, "l (shards k) -> shards (l k)", shards=shards).sum(-1).max())


def _number(text: str, capacity: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < math.inf:
        raise UserError(f"capacity {capacity!r}: expected a positive number before its unit")
    return value
