"""Sizes of pools and page tables: capacities as users state them, and sizes that several contexts share programs by."""

import math
import os

import jax

from kvjax.errors import UserError, byte_size, whole_number
from kvjax.mesh import SHARDS, axis_size

MARGIN = 1.25
"""Pages that are reserved for each page of the policy's expected need, up to the need of a full cache."""
SMALL_POOL = 1 << 20
"""Bytes of a shard's pool up to which its size is a power of two: there programs cost more than memory."""
LEAST_TOKENS = 64
"""The fewest tokens that page tables are made for."""


class CapacityError(UserError):
    """The pool is too small for what the policy keeps of these tokens."""


def device_bytes(*, free: bool = False) -> int:
    """Return the bytes of memory of one device, or those that are free. Where the device does not say: of the host,
    divided among its virtual devices."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - (stats.get("bytes_in_use", 0) if free else 0)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()


def table_tokens(tokens: int) -> int:
    """Return the tokens that a page table for `tokens` has columns for: a power of two, so that contexts of about one
    length run the same programs. A table takes 4 bytes for each page of tokens."""
    return max(LEAST_TOKENS, 1 << (tokens - 1).bit_length())


def pool_size(pages: int, page_bytes: int) -> int:
    """Return the pages of a pool that has to hold `pages`: a power of two up to `SMALL_POOL`, above it up to an eighth
    more, so that contexts of about one size run the same programs."""
    if pages * page_bytes <= SMALL_POOL:
        return 1 << (max(1, pages) - 1).bit_length()
    step = 1 << (pages.bit_length() - 4)
    return -(-pages // step) * step


def worth_shrinking(pages: int, size: int, page_bytes: int) -> bool:
    """Return True if a pool of `size` pages instead of `pages` saves half of it, and more than programs cost."""
    return size <= pages // 2 and pages * page_bytes > SMALL_POOL


def parse_capacity(text: str) -> int | str:
    """Parse a capacity of a command line: `4096` entries per KV head, `2GiB`, or `30%` of a device's memory."""
    return int(text) if text.isdigit() else text


def capacity_pages(capacity: int | str, rows: int, page_size: int, page_bytes: int) -> int:
    """Return the pages a shard that a capacity stands for.

    Args:
        capacity: entries per KV head on average (an int), bytes of all shards together ("2GiB", "500MB"), or a share of
            each device's memory ("30%").
        rows: head caches of a shard.
        page_bytes: bytes of a page with its entries' metadata.

    Raises UserError for anything else.
    """
    if not isinstance(capacity, str):
        what = "capacity (entries per kv head, bytes as 2GiB or a share as 30%)"
        return -(-whole_number("cache", what, capacity, most=2**62) * rows // page_size)
    if capacity.endswith("%"):
        return int(_share(capacity) * device_bytes()) // page_bytes
    size = byte_size(capacity)
    if size is None:
        raise UserError(
            f"capacity {capacity!r}: expected entries per kv head (4096), bytes (2GiB) or a share (30%)"
        )
    return size // (page_bytes * axis_size(*SHARDS))


def capacity_like(capacity: int | str, pages: int, rows: int, page_size: int, page_bytes: int) -> str:
    """Return the capacity, in the unit of another one, that stands for so many pages a shard."""
    if not isinstance(capacity, str):
        return str(-(-pages * page_size // rows))
    if capacity.endswith("%"):
        return f"{math.ceil(1e4 * pages * page_bytes / device_bytes()) / 100}%"
    return f"{-(-pages * page_bytes * axis_size(*SHARDS) // 2**20)}MiB"


def _share(capacity: str) -> float:
    try:
        percent = float(capacity[:-1])
    except ValueError:
        percent = math.nan
    if not 0 < percent <= 100:
        raise UserError(f"capacity {capacity!r}: expected more than 0% and at most 100% of a device's memory")
    return percent / 100
