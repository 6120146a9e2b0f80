"""Sizes of pools and page tables, an empty cache, and copies of a cache with more pages or fewer.

Sizes either follow from the capacity that a user states, or are rounded so that several contexts share programs.
"""

import dataclasses
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, Float, Int

from kvjax.cache.max_entries import PRIORITY
from kvjax.cache.pages import SCALE, Cache, LayerCache, Pages, entry_bytes, ring_pages
from kvjax.cache.sliding import grown
from kvjax.errors import UserError, byte_size, whole_number
from kvjax.mesh import BATCH, HEADS, SHARDS, P, axis_size, batch_shards, specs_of

MARGIN = 1.25
"""The factor by which a pool exceeds the policy's expected need, up to the need of a full cache."""
SMALL_POOL = 1 << 20
"""Bytes of a shard's pool up to which its size is a power of two. For a small pool, compiling costs more than
memory."""
LEAST_POOL = SMALL_POOL // 4
"""The smallest size of a shard's pool in bytes."""
LEAST_TOKENS = 128
"""The smallest number of tokens that page tables have columns for."""


class CapacityError(UserError):
    """The pool is too small for the entries that the policy keeps."""


def device_bytes(*, free: bool = False) -> int:
    """Return the bytes of one device's memory, or its free bytes. With several processes this is the minimum over them,
    rounded down to MiB. If the device reports no size, the host's memory is divided among its virtual devices."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        size = stats["bytes_limit"] - (stats.get("bytes_in_use", 0) if free else 0)
    else:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()
    if jax.process_count() == 1:
        return size
    return int(multihost_utils.process_allgather(np.int32(size >> 20)).min()) << 20


def table_tokens(tokens: int) -> int:
    """Return the number of tokens that a page table for `tokens` tokens has columns for: a power of two, so that
    contexts of similar lengths run the same programs. A table takes 4 bytes for each page of tokens."""
    return max(LEAST_TOKENS, 1 << (tokens - 1).bit_length())


def pool_size(pages: int, page_bytes: int) -> int:
    """Return the size of a pool that has to hold `pages` pages, rounded up so that contexts of similar sizes run the
    same programs: to a power of two from `LEAST_POOL` to `SMALL_POOL`, and by at most an eighth above that."""
    if pages * page_bytes <= SMALL_POOL:
        return 1 << (max(1, pages, LEAST_POOL // page_bytes) - 1).bit_length()
    step = 1 << max(0, pages.bit_length() - 4)
    return -(-pages // step) * step


def worth_shrinking(pages: int, size: int, page_bytes: int) -> bool:
    """Return True if a pool of `size` pages saves at least half the memory of one of `pages` pages, and the larger one
    is above `SMALL_POOL`."""
    return size <= pages // 2 and pages * page_bytes > SMALL_POOL


def parse_capacity(text: str) -> int | str:
    """Parse a capacity of a command line: `4096` entries per KV head, `2GiB`, or `30%` of a device's memory."""
    return int(text) if text.isdigit() else text


def capacity_pages(capacity: int | str, rows: int, page_size: int, page_bytes: int) -> int:
    """Return the pages of a shard's pool, given a capacity.

    Args:
        capacity: entries per KV head on average (an int), bytes of all shards together ("2GiB", "500MB"), or a share of
            each device's memory ("30%").
        rows: head caches of a shard.
        page_bytes: bytes of a page with its entries' metadata.

    Raises UserError for anything else.
    """
    value = check_capacity(capacity)
    if not isinstance(capacity, str):
        return -(-int(value) * rows // page_size)
    if capacity.endswith("%"):
        return int(value * device_bytes()) // page_bytes
    return int(value) // (page_bytes * axis_size(*SHARDS))


def check_capacity(capacity: int | str) -> int | float:
    """Return the number in a capacity: entries, bytes or a share. Raises UserError for any other value."""
    if not isinstance(capacity, str):
        name = "capacity (entries per kv head, bytes as 2GiB or a share as 30%)"
        return whole_number("cache", name, capacity, most=2**62)
    if capacity.endswith("%"):
        return _share(capacity)
    size = byte_size(capacity)
    if size is None:
        raise UserError(
            f"capacity {capacity!r}: expected entries per kv head (4096), bytes (2GiB) or a share (30%)"
        )
    return size


def capacity_like(capacity: int | str, pages: int, rows: int, page_size: int, page_bytes: int) -> str:
    """Return the capacity of `pages` pages per shard, in the unit of `capacity`."""
    if not isinstance(capacity, str):
        return str(-(-pages * page_size // max(rows, 1)))
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


def pages_of(
    length: Int[np.ndarray, "l b k"], counted: Int[np.ndarray, " b"], window: int, page_size: int
) -> np.ndarray:
    """Return the pages that each head cache's local window and its retained entries take [l b k 2]. `counted`:
    `Cache.counted`."""
    rings = ring_pages(np.minimum(counted + 1, window), page_size)
    rings = np.broadcast_to(rings[None, :, None], length.shape)
    return np.stack([rings, -(-length // page_size)], -1)


def by_shard(x: Int[np.ndarray, "l b k *r"]) -> Int[np.ndarray, "shards rows *r"]:
    """Return numbers of head caches, grouped by the shards of the current mesh."""
    (layers, batch, heads), b, h = x.shape[:3], batch_shards(), axis_size(*HEADS)
    x = x.reshape(layers, b, batch // b, h, heads // h, *x.shape[3:])
    return np.moveaxis(x, (1, 3), (0, 1)).reshape(b * h, -1, *x.shape[5:])


def shard_pages(
    length: Int[np.ndarray, "l b k"], counted: Int[np.ndarray, " b"], window: int, page_size: int
) -> Int[np.ndarray, " shards"]:
    """Return the pages that each shard's head caches take. Arguments as in `pages_of`."""
    return by_shard(pages_of(length, counted, window, page_size)).sum((1, 2))


def longest_lengths(
    length: Int[np.ndarray, "l b k"],
    counted: Int[np.ndarray, " b"],
    tokens: int | Int[np.ndarray, " b"],
    window: int,
    max_entries: int | None,
) -> Int[np.ndarray, "l b k"]:
    """Return the most retained entries that each head cache may have after `tokens` more tokens, whatever the policy
    retains. `counted`: `Cache.counted`."""
    leaving = np.maximum(counted + tokens - window + 1, 0) - np.maximum(counted - window + 1, 0)
    longest = length + leaving[:, None]
    return longest if max_entries is None else np.maximum(np.minimum(longest, max_entries), length)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The shape of a cache, for the current mesh."""

    batch: int
    """The number of sequences, a multiple of the mesh's batch shards."""
    layers: int
    """Layers with full attention."""
    kv_heads: int
    """KV heads of the whole model."""
    head_dim: int
    window: int
    """The number of last tokens that are always visible."""
    tokens: int
    """Tokens of the longest sequence, which the page table has columns for."""
    page_size: int
    """Tokens per page."""
    pages: int
    """Pages of a shard's pool."""
    dtype: Any
    """Dtype of keys and values."""
    stored: Any
    """Dtype in which keys and values are stored. An unsigned integer of the same width holds their bits."""
    int8: bool = False
    """True if the pool holds int8 numbers with scales. `stored` is then only the dtype of sliding windows."""
    bounds: Any = None
    """Dtype of the bounds of each page's keys; None: there are no bounds."""
    metadata: tuple[tuple[str, Any], ...] = ()
    """Names and dtypes of the entry metadata, including those of `max_entries` but not the scales of int8 entries."""
    limit: int | None = None
    """The most pages that a shard's pool may ever have; None: as many as the devices have memory for."""
    sliding_layers: int = 0
    """Layers with a sliding window; `layers` counts the others."""
    sliding_window: int = 0
    """The number of last tokens that sliding-window layers see."""
    sliding_slots: int = 0
    """The slots of a sliding-window layer."""
    head_order: tuple[tuple[int, ...], ...] | None = None
    """See `Cache`."""
    masks_windows: bool = False
    """True if the sliding windows have a mask of dropped tokens from the beginning (`Cache.dropped_slots`)."""

    @property
    def entry_bytes(self) -> int:
        """Bytes of a token's key and value in one kv head."""
        return entry_bytes(self.head_dim, self.dtype, int8=self.int8)


def empty(
    layout: Layout, state: Any, observations: Any, key_scale: Float[Array, "l k h"] | None = None
) -> Cache:
    """Return a cache that has seen nothing, on the current mesh. Jit it, since it is a hundred small programs if run
    eagerly.

    Args:
        state: the methods' memories before the first token, `[l b …]`.
        observations: observation buffers `[b w l …]`.
        key_scale: as in `LayerCache`, for all sequences; None: 1. Only for int8 entries.
    """
    layers, batch, heads = layout.layers, layout.batch, layout.kv_heads
    pages, page_size, width = layout.pages, layout.page_size, 2 * layout.head_dim
    shards, slots = axis_size(*SHARDS), layout.window - 1
    columns = max(1, ring_pages(layout.window, page_size) + -(-max(layout.tokens - slots, 0) // page_size))
    rows = P(None, BATCH, HEADS, None)

    def all_free():
        return jnp.arange(pages, dtype=jnp.int32)[::-1], jnp.full(1, pages, jnp.int32)

    free, count = jax.shard_map(all_free, in_specs=(), out_specs=(P(SHARDS), P(SHARDS)))()
    table = jnp.full((layers, batch, heads, columns), pages, jnp.int32, out_sharding=rows)
    pool_dtype = jnp.int8 if layout.int8 else layout.stored
    pool = jnp.zeros((shards * pages, page_size, width), pool_dtype, out_sharding=P(SHARDS, None, None))
    bounds = None
    if layout.bounds is not None:
        bounds = jnp.full((shards * pages, width), jnp.inf, layout.bounds, out_sharding=P(SHARDS, None))
    dtypes = dict(layout.metadata) | ({SCALE: jnp.int32} if layout.int8 else {})
    metadata = {
        name: jnp.zeros(pool.shape[:2], dtype, out_sharding=P(SHARDS, None)) for name, dtype in dtypes.items()
    }
    numbers = {
        name: jnp.zeros((layers, batch, heads, slots), dtype, out_sharding=rows)
        for name, dtype in dtypes.items()
        if name != PRIORITY
    }
    layer_cache = LayerCache(
        page_table=table,
        length=jnp.zeros((layers, batch, heads), jnp.int32, out_sharding=P(None, BATCH, HEADS)),
        priority=jnp.full((layers, batch, heads, slots), jnp.nan, jnp.float32, out_sharding=rows),
        numbers=numbers,
        state=state,
    )
    if layout.int8:
        key_scale = jnp.ones(1) if key_scale is None else key_scale[:, None]
        key_scale = jnp.broadcast_to(key_scale, (layers, batch, heads, layout.head_dim), out_sharding=rows)
        layer_cache = dataclasses.replace(layer_cache, key_scale=key_scale)
    seen = jnp.zeros(batch, jnp.int32, out_sharding=P(BATCH))
    storage = Pages(pool, free, count, layout.dtype, bounds, metadata)
    windows, dropped = None, None
    if layout.sliding_layers:
        shape = layout.sliding_layers, batch, heads, layout.sliding_slots, width
        windows = jnp.zeros(shape, layout.stored, out_sharding=P(None, BATCH, HEADS, None, None))
        if layout.masks_windows:
            dropped = jnp.zeros((batch, layout.sliding_slots), bool, out_sharding=P(BATCH, None))
    return Cache(
        storage, layer_cache, seen, jnp.zeros_like(seen), observations, window=layout.window, limit=layout.limit,
        sliding=windows, dropped_slots=dropped, sliding_window=layout.sliding_window, head_order=layout.head_order,
    )  # fmt: skip


def resize(cache: Cache, pages: int, columns: int = 0, tokens: int = 0) -> Cache:
    """Return a copy of a cache with another pool.

    Args:
        pages: pages of each shard's pool, at least those in use.
        columns: columns that are added to the page tables.
        tokens: tokens of a sequence that windows of sliding-window layers get slots for, if these are more than before.
    """

    def local(old: Pages, layers: LayerCache) -> tuple[Pages, LayerCache]:
        old_pages, table = old.pool.shape[0], layers.page_table
        used = jnp.zeros(old_pages, bool).at[table].set(True, mode="drop")
        place = jnp.cumsum(used, dtype=jnp.int32) - 1
        source = jnp.zeros(pages, jnp.int32)
        source = source.at[jnp.where(used, place, pages)].set(
            jnp.arange(old_pages, dtype=jnp.int32), mode="drop"
        )
        held = jnp.arange(pages) <= place[-1]
        # a debt and a mark of numbers that are not finite must stay
        count = jnp.where(old.free_count < 0, old.free_count, pages - 1 - place[-1])
        table = jnp.where(table < old_pages, place.at[table].get(mode="clip"), pages)
        table = jnp.pad(table, ((0, 0), (0, 0), (0, 0), (0, columns)), constant_values=pages)
        new = Pages(
            pool=old.pool[source],
            free=jnp.arange(pages, dtype=jnp.int32)[::-1],
            free_count=count,
            dtype=old.dtype,
            bounds=None if old.bounds is None else jnp.where(held[:, None], old.bounds[source], jnp.inf),
            metadata={name: x[source] for name, x in old.metadata.items()},
            others=None if old.others is None else jnp.where(held, old.others[source], 0),
        )
        return new, dataclasses.replace(layers, page_table=table)

    specs = specs_of((cache.pages, cache.layers))
    new_pages, new_layers = jax.shard_map(local, out_specs=specs)(cache.pages, cache.layers)
    windows, dropped = cache.sliding, cache.dropped_slots
    if windows is not None:
        windows = grown(windows, cache.sliding_window, tokens)
        if dropped is not None:
            dropped = jnp.pad(dropped, ((0, 0), (0, windows.shape[3] - dropped.shape[1])))
    return dataclasses.replace(
        cache, pages=new_pages, layers=new_layers, sliding=windows, dropped_slots=dropped
    )
