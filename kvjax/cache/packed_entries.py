"""A cache's contents without its pool: the entries of every head cache in order, independent of page size and mesh.

The functions run on the host, in NumPy and in one process.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Shaped

from kvjax.cache.max_entries import POSITION
from kvjax.cache.pages import SCALE, Cache, LayerCache, ring_pages
from kvjax.cache.sizes import by_shard, pages_of, table_tokens
from kvjax.cache.sliding import position_of_slot, slots_for
from kvjax.mesh import HEADS, axis_size, batch_shards, put
from kvjax.struct import changed, leaves_by_path
from pallas_kernels.int8_entries import scales

Arrays = dict[str, np.ndarray]
"""The arrays of a packed cache, by name. "entries" and "ring" [n kv] hold the retained entries and the local windows of
all head caches (layer, sequence, kv head) one after another, the window's oldest token first. "metadata.…" [n] hold the
metadata of the retained entries. "length" [l b k], "seen" [b], "priority", "numbers.…" and "state.…" [l b …] and
"observations.…" [b …] are as in the cache. So are "key_scale", if there is one, and "sliding", which has no more slots
than its tokens need. "origin" [b] and "hidden" [b s], which is `Cache.dropped_slots`, exist only if tokens of
windows were dropped."""
ORIGIN, DROPPED_SLOTS = "origin", "hidden"


class Places(NamedTuple):
    """Places of entries, one after another, head cache by head cache."""

    row: Int[np.ndarray, " n"]
    """The index of the head cache, in the order of the page table."""
    place: Int[np.ndarray, " n"]
    """The place in the head cache, from 0."""


def places(count: Int[np.ndarray, "l b k"]) -> Places:
    """Return the places of head caches with `count` entries each."""
    count = count.reshape(-1)
    row = np.repeat(np.arange(count.size), count)
    return Places(row, np.arange(row.size) - np.repeat(np.cumsum(count) - count, count))


Order = Int[np.ndarray, "l k"] | None
"""For each layer, the heads in another order; None: unchanged."""


def head_at_place(x: Any) -> Order:
    """Return the model's kv head at each place of a cache or a model's configuration; None: heads are in the model's
    order."""
    return None if x.head_order is None else np.array(x.head_order)


def place_of_head(x: Any) -> Order:
    """Return the place of each of the model's kv heads in a cache or a model's configuration; None: heads are in the
    model's order."""
    return None if x.head_order is None else np.argsort(x.head_order)


def with_heads_in_order(
    x: Shaped[np.ndarray, "..."], order: Order, layer: int, head: int
) -> Shaped[np.ndarray, "..."]:
    """Return an array with its heads in another order. layer, head: the axes of layers and heads. The heads may be
    query heads, of which each kv head has the same number."""
    if order is None:
        return x
    x = np.moveaxis(x, (layer, head), (0, 1))
    layers, heads = order.shape
    groups = x.reshape(layers, heads, x.shape[1] // heads, *x.shape[2:])
    return np.moveaxis(groups[np.arange(layers)[:, None], order].reshape(x.shape), (0, 1), (layer, head))


def _all_with_heads_in_order(arrays: Any, like: Any, order: Order, layer: int) -> Any:
    """Return arrays with their heads in another order. like: jax arrays of the same axes, whose shardings show which
    axes are heads."""

    def reordered(x, like):
        spec = list(like.sharding.spec)
        return with_heads_in_order(x, order, layer, spec.index(HEADS)) if HEADS in spec else x

    return arrays if order is None else jax.tree.map(reordered, arrays, like)


def _shards_of_rows(shape: tuple[int, ...], order: Order) -> Int[np.ndarray, " rows"]:
    """Return the shard of each head cache of an `[l b k]` array in the model's order of heads. order: their places."""
    layers, batch, heads = shape
    b, h = batch_shards(), axis_size(*HEADS)
    shard = np.arange(batch)[:, None] // (batch // b) * h + np.arange(heads) // (heads // h)
    return with_heads_in_order(np.broadcast_to(shard, (layers, batch, heads)), order, 0, 2).reshape(-1)


def _addresses(
    table: np.ndarray, column: np.ndarray, places: Places, page_size: int, pages: int, order: Order
) -> Any:
    """Return page and offset of entries in these columns of their head caches' tables. The page counts over the pools
    of all shards, which have `pages` pages each."""
    shard = _shards_of_rows(table.shape[:3], order)[places.row]
    return table.reshape(-1, table.shape[-1])[places.row, column] + shard * pages, places.place % page_size


def _slots(ring: Places, counted: np.ndarray, in_window: np.ndarray, window: int) -> Places:
    """Return the slots of the local window's tokens. Counted token i is in slot i mod (window − 1)."""
    oldest = (counted - np.minimum(counted, window - 1))[None, :, None]
    first = np.broadcast_to(oldest, in_window.shape).reshape(-1)
    return Places(ring.row, (first[ring.row] + ring.place) % max(window - 1, 1))


def _small(layers: LayerCache) -> dict[str, Any]:
    """Return the arrays of each layer and sequence that are saved in addition to the entries."""
    names = "length", "priority", "numbers", "state", "key_scale"
    return {name: getattr(layers, name) for name in names}


def packed(cache: Cache) -> Arrays:
    """Return the contents of a cache, without the empty sequences that a mesh adds. Call it on the cache's mesh."""
    live, counted = np.asarray(cache.seen) > 0, np.asarray(cache.counted)
    pages, order = cache.pages, place_of_head(cache)
    layers = _all_with_heads_in_order(jax.tree.map(np.asarray, cache.layers), cache.layers, order, 0)
    size, pool_pages = cache.page_size, pages.pool.shape[0] // len(np.asarray(pages.free_count))
    in_window = np.minimum(counted, cache.window - 1)
    in_window = np.broadcast_to(in_window[None, :, None], layers.length.shape)
    stored, ring = places(layers.length), places(in_window)
    columns = ring_pages(cache.window, size)
    entry_places = _addresses(
        layers.page_table, columns + stored.place // size, stored, size, pool_pages, order
    )
    slots = _slots(ring, counted, in_window, cache.window)
    in_ring = _addresses(layers.page_table, slots.place // size, slots, size, pool_pages, order)
    pool = _as_floats(np.asarray(pages.pool), pages.dtype)
    arrays = {"entries": pool[entry_places], "ring": pool[in_ring], "seen": np.asarray(cache.seen)[live]}
    if (origin := np.asarray(cache.origin)[live]).any():
        arrays[ORIGIN] = origin
    arrays |= {f"metadata.{name}": np.asarray(x)[entry_places] for name, x in pages.metadata.items()}
    arrays |= {name: x[:, live] for name, x in leaves_by_path(_small(layers)).items()}
    observations = _all_with_heads_in_order(
        jax.tree.map(np.asarray, cache.observations), cache.observations, order, 2
    )
    observations = jax.tree.map(lambda x: _as_floats(x, pages.dtype)[live], observations)
    if cache.sliding is not None:
        slots = slots_for(cache.sliding_window, table_tokens(int(arrays["seen"].max())))
        arrays["sliding"] = _as_floats(np.asarray(cache.sliding), pages.dtype)[:, live, :, :slots]
        mask = cache.dropped_slots
        if mask is not None and (dropped := np.asarray(mask)[live, :slots]).any():
            arrays[DROPPED_SLOTS] = dropped
    return arrays | leaves_by_path({"observations": observations})


def _as_floats(x: np.ndarray, dtype: Any) -> np.ndarray:
    return x.view(np.dtype(dtype)) if x.dtype == np.uint16 else x


def unpacked(like: Cache, arrays: Arrays) -> Cache:
    """Return the cache that holds these arrays, on the current mesh.

    Args:
        like: a cache of the shapes, dtypes and shardings wanted, with enough pages (`pages_of`).
    """
    batch, window, size = like.seen.shape[0], like.window, like.page_size
    shards = like.pages.free_count.shape[0]
    pool_pages, order = like.pages.pool.shape[0] // shards, place_of_head(like)

    def padded(x: np.ndarray, axis: int, value: int = 0) -> np.ndarray:
        """Return `x` with the empty sequences that the mesh adds."""
        padding = [(0, 0)] * x.ndim
        padding[axis] = (0, batch - x.shape[axis])
        return np.pad(x, padding, constant_values=value)

    seen, length = padded(arrays["seen"], 0), padded(arrays["length"], 1)
    origin = padded(arrays[ORIGIN], 0) if ORIGIN in arrays else np.zeros_like(seen)
    counted = seen - origin
    table, used = _page_table(like, pages_of(length, counted, window, size))
    ring = ring_pages(window, size)
    in_window = np.broadcast_to(np.minimum(counted, window - 1)[None, :, None], length.shape)
    stored, slots = places(length), _slots(places(in_window), counted, in_window, window)
    entry_places = _addresses(table, ring + stored.place // size, stored, size, pool_pages, order)
    in_ring = _addresses(table, slots.place // size, slots, size, pool_pages, order)
    pool = np.zeros(like.pages.pool.shape, arrays["entries"].dtype)
    pool[entry_places], pool[in_ring] = arrays["entries"], arrays["ring"]
    metadata = {}
    for name, field in like.pages.metadata.items():
        metadata[name] = np.zeros(field.shape, field.dtype)
        metadata[name][entry_places] = arrays[f"metadata.{name}"]
    if like.pages.int8 and window > 1:
        by_slot = padded(arrays[f"numbers.{SCALE}"], 1).reshape(-1, window - 1)
        metadata[SCALE][in_ring] = by_slot[slots.row, slots.place]
    bounds = like.pages.bounds
    if bounds is not None:
        k = arrays["entries"][:, : pool.shape[-1] // 2]
        if like.pages.int8:
            key_scales = scales(jnp.asarray(arrays[f"metadata.{SCALE}"]))[0]
            head_scales = padded(arrays["key_scale"], 1).reshape(-1, k.shape[-1])[stored.row]
            k = (k * np.asarray(key_scales)[:, None] * head_scales).astype(like.pages.dtype)
        bounds, k = np.full(bounds.shape, np.inf, bounds.dtype), k.astype(bounds.dtype)
        np.minimum.at(bounds, entry_places[0], np.concatenate([k, -k], -1))
    free = np.tile(np.arange(pool_pages, dtype=np.int32)[::-1], shards)
    pages = changed(
        like.pages, pool=pool.view(like.pages.pool.dtype), free=free, free_count=(pool_pages - used).astype(np.int32),
        bounds=bounds, metadata=metadata,
    )  # fmt: skip
    small = _small(like.layers)
    names = leaves_by_path(small)
    if (name := f"numbers.{POSITION}") in names and name not in arrays:
        # older files lack them; no tokens were dropped from such caches
        by_slot = position_of_slot(window - 1, window - 1, arrays["seen"])[None, :, None]
        arrays = arrays | {name: np.broadcast_to(by_slot, arrays["priority"].shape)}
    leaves = [padded(arrays[name], 1, int(name == "key_scale")) for name in names]
    small = jax.tree.unflatten(jax.tree.structure(small), leaves)
    layers = changed(like.layers, page_table=table, **small)
    layers = _all_with_heads_in_order(layers, like.layers, head_at_place(like), 0)
    observations = leaves_by_path({"observations": like.observations})
    observations = [padded(arrays[name], 0).view(x.dtype) for name, x in observations.items()]
    observations = jax.tree.unflatten(jax.tree.structure(like.observations), observations)
    observations = _all_with_heads_in_order(observations, like.observations, head_at_place(like), 2)
    windows = like.sliding
    if windows is not None:
        windows = padded(arrays["sliding"], 1).view(windows.dtype)
    dropped = like.dropped_slots
    if dropped is not None:
        dropped = (
            padded(arrays[DROPPED_SLOTS], 0) if DROPPED_SLOTS in arrays else np.zeros(dropped.shape, bool)
        )
    cache = changed(
        like, pages=pages, layers=layers, seen=seen, origin=origin, observations=observations, sliding=windows,
        dropped_slots=dropped,
    )  # fmt: skip
    return jax.tree.map(_put, cache, like)


def _page_table(like: Cache, need: Int[np.ndarray, "l b k 2"]) -> tuple[np.ndarray, np.ndarray]:
    """Return a page table [l b k c] and the number of pages that each shard uses. Head caches take the first pages of
    their shards' pools in order. need: the pages of each head cache (`pages_of`)."""
    shards, ring = like.pages.free_count.shape[0], ring_pages(like.window, like.page_size)
    pool_pages, flat = like.pages.pool.shape[0] // shards, need.reshape(-1, 2)
    shard_of_row = _shards_of_rows(need.shape[:3], place_of_head(like))
    first = np.zeros(len(flat), np.int64)
    for shard in range(shards):
        in_shard = shard_of_row == shard
        first[in_shard] = np.cumsum(flat[in_shard].sum(1)) - flat[in_shard].sum(1)
    table = np.full((len(flat), like.layers.page_table.shape[-1]), pool_pages, np.int32)
    for part, start in ((0, 0), (1, ring)):
        row, place = places(need[..., part])
        table[row, start + place] = first[row] + part * flat[row, 0] + place
    used = by_shard(with_heads_in_order(need, head_at_place(like), 0, 2)).reshape(shards, -1).sum(1)
    return table.reshape(*need.shape[:3], -1), used


def _put(x: Shaped[np.ndarray, "..."], like: Any) -> jax.Array:
    return put(x.astype(like.dtype), *like.sharding.spec)
