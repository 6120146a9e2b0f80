"""An empty cache, and copies of a cache with more pages or fewer."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.cache.max_entries import PLANES as MAX_ENTRIES_PLANES
from kvjax.cache.pages import Cache, LayerCache, Pages, ring_pages
from kvjax.mesh import BATCH, HEADS, SHARDS, P, axis_size


@dataclasses.dataclass(frozen=True)
class Layout:
    """The shape of a cache, for the current mesh."""

    batch: int
    """Sequences, a multiple of the mesh's batch shards."""
    layers: int
    """Of the model."""
    kv_heads: int
    """Of the whole model."""
    head_dim: int
    """Of keys and of values."""
    window: int
    """The last tokens that are always visible."""
    tokens: int
    """Of the longest sequence: the page table has columns for them."""
    page_size: int
    """Tokens per page."""
    pages: int
    """Pages of a shard's pool."""
    dtype: Any
    """Of keys and values."""
    stored: Any
    """Of the pool; an unsigned integer of the same width holds their bits."""
    bounds: Any = None
    """Of the bounds of each page's keys; None: there are none."""
    planes: tuple[tuple[str, Any], ...] = ()
    """The methods' own numbers of entries, and the ones that `max_entries` needs: names and dtypes."""
    limit: int | None = None
    """Most pages that a shard's pool may ever have; None: as many as the devices have memory for."""


def empty(layout: Layout, state: Any, trail: Any) -> Cache:
    """A cache that has seen nothing, on the current mesh. To be jitted: eagerly it is a hundred small programs.

    state, trail: the methods' memories before the first token, `[l b …]`, and rings `[b w l …]`.
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
    pool = jnp.zeros((shards * pages, page_size, width), layout.stored, out_sharding=P(SHARDS, None, None))
    bounds = None
    if layout.bounds is not None:
        bounds = jnp.full((shards * pages, width), jnp.inf, layout.bounds, out_sharding=P(SHARDS, None))
    planes = {
        name: jnp.zeros(pool.shape[:2], dtype, out_sharding=P(SHARDS, None)) for name, dtype in layout.planes
    }
    numbers = {
        name: jnp.zeros((layers, batch, heads, slots), dtype, out_sharding=rows)
        for name, dtype in layout.planes
        if name not in MAX_ENTRIES_PLANES
    }
    layer_cache = LayerCache(
        page_table=table,
        length=jnp.zeros((layers, batch, heads), jnp.int32, out_sharding=P(None, BATCH, HEADS)),
        priority=jnp.full((layers, batch, heads, slots), jnp.nan, jnp.float32, out_sharding=rows),
        numbers=numbers,
        state=state,
    )
    seen = jnp.zeros(batch, jnp.int32, out_sharding=P(BATCH))
    pages_ = Pages(pool, free, count, layout.dtype, bounds, planes)
    return Cache(pages_, layer_cache, seen, trail, window=layout.window, limit=layout.limit)


def resize(cache: Cache, pages: int, columns: int = 0) -> Cache:
    """Return a copy whose pool has `pages` pages a shard, at least those in use, and whose page tables have `columns`
    more columns."""

    def local(old: Pages, layers: LayerCache) -> tuple[Pages, LayerCache]:
        had, table = old.pool.shape[0], layers.page_table
        used = jnp.zeros(had, bool).at[table].set(True, mode="drop")
        place = jnp.cumsum(used, dtype=jnp.int32) - 1
        source = jnp.zeros(pages, jnp.int32)
        source = source.at[jnp.where(used, place, pages)].set(jnp.arange(had, dtype=jnp.int32), mode="drop")
        held = jnp.arange(pages) <= place[-1]
        # a debt and a mark of numbers that are not finite stay what they are
        count = jnp.where(old.free_count < 0, old.free_count, pages - 1 - place[-1])
        table = jnp.where(table < had, place.at[table].get(mode="clip"), pages)
        table = jnp.pad(table, ((0, 0), (0, 0), (0, 0), (0, columns)), constant_values=pages)
        new = Pages(
            pool=old.pool[source],
            free=jnp.arange(pages, dtype=jnp.int32)[::-1],
            free_count=count,
            dtype=old.dtype,
            bounds=None if old.bounds is None else jnp.where(held[:, None], old.bounds[source], jnp.inf),
            planes={name: x[source] for name, x in old.planes.items()},
            others=None if old.others is None else jnp.where(held, old.others[source], 0),
        )
        return new, dataclasses.replace(layers, page_table=table)

    specs = jax.tree.map(lambda leaf: jax.typeof(leaf).sharding.spec, (cache.pages, cache.layers))
    new_pages, new_layers = jax.shard_map(local, out_specs=specs)(cache.pages, cache.layers)
    return dataclasses.replace(cache, pages=new_pages, layers=new_layers)
