"""Rollback: a cache as it was before some tokens were run over it, for calls that may be repeated.

New retained entries are written after the old ones, so the pool need not be copied. Only the windows and the metadata,
which are overwritten, are copied. With `max_entries` entries replace each other, and the whole pool is copied.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.cache.max_entries import METADATA
from kvjax.cache.pages import Cache, LayerCache, ring_pages
from kvjax.mesh import BATCH, HEADS, P
from kvjax.struct import struct


@struct
class Mark:
    """The state of a cache that `rolled_back` restores."""

    layers: LayerCache
    seen: Int[Array, " b"]
    origin: Int[Array, " b"]
    observations: Any
    free: Int[Array, " p"]
    free_count: Int[Array, " shards"]
    bounds: Float[Array, "p kv"] | None
    metadata: dict[str, Shaped[Array, "p page"]]
    rings: Shaped[Array, "l b k r page kv"] | None
    """The pages of the local windows; None if `pool` holds them."""
    pool: Shaped[Array, "p page kv"] | None
    """The whole pool, with `max_entries`; else None."""
    sliding: Shaped[Array, "l b k s kv"] | None
    """The windows of sliding-window layers."""
    dropped_slots: Bool[Array, "b s"] | None
    """The mask of their dropped tokens."""


@jax.jit
def marked(cache: Cache) -> Mark:
    """Return a mark of the cache's current state. It holds copies, so the cache may be donated."""
    ring, pages = ring_pages(cache.window, cache.page_size), cache.pages
    capped = set(METADATA) <= set(pages.metadata)

    def rings(pool, table):
        return pool[table[..., :ring]]

    spec = P(None, BATCH, HEADS, None, None, None)
    window_pages = (
        None if capped else jax.shard_map(rings, out_specs=spec)(pages.pool, cache.layers.page_table)
    )
    mark = Mark(
        cache.layers, cache.seen, cache.origin, cache.observations, pages.free, pages.free_count, pages.bounds,
        pages.metadata, window_pages, pages.pool if capped else None, cache.sliding, cache.dropped_slots,
    )  # fmt: skip
    return jax.tree.map(jnp.copy, mark)


def rolled_back(cache: Cache, mark: Mark) -> Cache:
    """Return the cache (donated, with the mark) as it was when it was marked. Since then tokens may have been run over
    it, but it must not have been compacted or resized."""
    pool = mark.pool
    if pool is None:
        pool = _with_rings(cache.pages.pool, mark.layers.page_table, mark.rings)
    of_pages = {name: getattr(mark, name) for name in ("free", "free_count", "bounds", "metadata")}
    pages = dataclasses.replace(cache.pages, pool=pool, **of_pages)
    names = "layers", "seen", "origin", "observations", "sliding", "dropped_slots"
    of_cache = {name: getattr(mark, name) for name in names}
    return dataclasses.replace(cache, pages=pages, **of_cache)


@jax.jit(donate_argnums=0)
def _with_rings(
    pool: Shaped[Array, "p page kv"], table: Int[Array, "l b k c"], rings: Shaped[Array, "l b k r page kv"]
) -> Shaped[Array, "p page kv"]:
    def written(pool, table, rings):
        return pool.at[table[..., : rings.shape[3]]].set(rings)

    return jax.shard_map(written, out_specs=jax.typeof(pool).sharding.spec)(pool, table, rings)
