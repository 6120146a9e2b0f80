"""How large a pool is: capacities as people state them, and what is expected where none is stated."""

import math
import os
from collections.abc import Callable, Sequence

import jax
import numpy as np
from einops import rearrange
from jaxtyping import Float, Int

from kvjax.cache.pages import ring_pages
from kvjax.errors import UserError, byte_size, whole_number
from kvjax.mesh import HEADS, SHARDS, axis_size, batch_shards

MARGIN = 1.25
"""How much larger than the policy's expected need the default pool is (never larger than the full cache)."""


class CapacityError(UserError):
    """The pool is too small for what the policy keeps of these tokens."""


def device_bytes(*, free: bool = False) -> int:
    """Memory of one device, or what of it is free; of the host, divided among its virtual devices, where the device
    does not say."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - (stats.get("bytes_in_use", 0) if free else 0)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()


SMALL_POOL = 1 << 20
"""Bytes of a shard's pool up to which its size is a power of two: there programs cost more than memory."""
LEAST_TOKENS = 64
"""The fewest tokens that tables are made for."""


def table_tokens(tokens: int) -> int:
    """For how many tokens a table is made that has to serve `tokens`: a power of two, so that contexts of about one
    length run the same programs. A table costs 4 bytes for each page of tokens."""
    return max(LEAST_TOKENS, 1 << (tokens - 1).bit_length())


def pool_size(pages: int, page_bytes: int) -> int:
    """Pages of a pool that has to hold `pages`: a power of two up to `SMALL_POOL`, above it up to an eighth more, so
    that contexts of about one size run the same programs."""
    if pages * page_bytes <= SMALL_POOL:
        return 1 << (max(1, pages) - 1).bit_length()
    step = 1 << (pages.bit_length() - 4)
    return -(-pages // step) * step


def halved_size(had: int, pages: int, page_bytes: int) -> int:
    """The same for a pool that turned out to have more than it needs: what it `had` up to `SMALL_POOL`; above it that,
    or the half, a quarter or an eighth."""
    return had if had * page_bytes <= SMALL_POOL else _halved(had, pages)


def _halved(most: int, least: int) -> int:
    """An eighth of `most`, a quarter, the half, or all of it: the first that is at least `least`."""
    return next((size for shift in (3, 2, 1) if (size := most >> shift) >= least), most)


def parse_capacity(text: str) -> int | str:
    """A capacity as written on a command line: `4096` entries per kv head, `2GiB`, or `30%` of a device's memory."""
    return int(text) if text.isdigit() else text


def pages_for(
    capacity: int | str | None,
    *,
    expected: Callable[[int], Float[np.ndarray, "#l #k"]],
    window: int,
    tokens: Sequence[int],
    layers: int,
    kv_heads: int,
    page_size: int,
    page_bytes: int,
) -> int:
    """Pages that one shard's pool has to have.

    Args:
        capacity: entries per kv head on average (an int), bytes of all shards together ("2GiB", "500MB"), a share of
            each device's memory ("30%"), or None: what is expected with a margin.
        expected: of so many tokens the most entries at one time, ring included, by layer and kv head.
        tokens: of each sequence, prompt and new tokens.
        page_bytes: of a page with what stands beside its entries.
    """
    parts, shards = axis_size(*HEADS), batch_shards()
    local_rows = layers * len(tokens) // shards * kv_heads // parts

    def need(share: Callable[[int], Float[np.ndarray, "#l #k"] | float]) -> int:
        """Pages of a shard whose sequences have their rings and, behind them, so many entries of each count."""

        def pages_of(count: int) -> int:
            held = np.maximum(np.minimum(share(count), count) - min(count, window - 1), 0)
            # a mean says little of one row: each may have a page more, as long as there are tokens for it
            most = -(-max(count - window + 1, 0) // page_size)
            ring = ring_pages(min(count + 1, window), page_size)
            pages = np.minimum(np.ceil(held / page_size) + (held > 0), most)
            pages = np.broadcast_to(pages, (layers, kv_heads)).astype(np.int64)
            return layers * kv_heads // parts * ring + largest_shard(pages, parts)

        pages = {count: pages_of(count) for count in set(tokens)}
        return max(1, int(np.array([pages[count] for count in tokens]).reshape(shards, -1).sum(1).max()))

    if capacity is None:
        return need(lambda count: expected(count) * MARGIN)
    if not isinstance(capacity, str):
        what = "capacity (entries per kv head, bytes as 2GiB or a share as 30%)"
        pages = -(-whole_number("cache", what, capacity, most=2**62) * local_rows // page_size)
    elif capacity.endswith("%"):
        pages = int(_share(capacity) * device_bytes()) // page_bytes
    else:
        size = byte_size(capacity)
        if size is None:
            raise UserError(
                f"capacity {capacity!r}: expected entries per kv head (4096), bytes (2GiB) or a share (30%)"
            )
        pages = size // (page_bytes * axis_size(*SHARDS))
    if pages < (least := need(lambda count: 0.0)):
        enough = _stated_like(capacity, need(float), page_size, page_bytes, local_rows)
        raise CapacityError(
            f"capacity {capacity}: {pages} pages of {page_size} tokens a device are fewer than the {least} that the "
            f"windows of {local_rows} (layer, sequence, kv head) rows take; {enough} holds every token"
        )
    return min(pages, most_pages(local_rows, max(tokens), window, page_size))


def most_pages(rows: int, tokens: int, window: int, page_size: int) -> int:
    """Return the pages of a shard whose `rows` head caches hold a full window and `tokens` retained entries each."""
    return rows * (ring_pages(window, page_size) + -(-tokens // page_size))


def largest_shard(pages: Int[np.ndarray, "l k"], shards: int) -> int:
    """Return the pages of the fullest of `shards` shards of the kv heads, given the pages of each head cache."""
    return int(rearrange(pages, "l (shards k) -> shards (l k)", shards=shards).sum(-1).max())


def _stated_like(capacity: int | str, pages: int, page_size: int, page_bytes: int, rows: int) -> str:
    """So many pages of a shard of `rows` rows as a capacity in the unit of another."""
    if not isinstance(capacity, str):
        return str(-(-pages * page_size // rows))
    if capacity.endswith("%"):
        return f"{math.ceil(1e4 * pages * page_bytes / device_bytes()) / 100}%"
    return f"{-(-pages * page_bytes * axis_size(*SHARDS) // 2**20)}MiB"


def _share(capacity: str) -> float:
    """Of "30%"."""
    try:
        percent = float(capacity[:-1])
    except ValueError:
        percent = math.nan
    if not 0 < percent <= 100:
        raise UserError(f"capacity {capacity!r}: expected more than 0% and at most 100% of a device's memory")
    return percent / 100
