"""Rollback: a cache as it was before some tokens were run over it, for what is only tried: questions and branches.

What is written to a global region stands behind what was there, so the pool itself need not be kept: only what is
written in place is, which is the rings and what stands beside entries, and all entries where `max_entries` lets
them change places.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from kvjax.cache.max_entries import PLANES
from kvjax.cache.pages import Cache, LayerCache, ring_pages
from kvjax.mesh import BATCH, HEADS, P
from kvjax.struct import struct


@struct
class Mark:
    """State of a cache, to take it back to."""

    layers: LayerCache
    seen: Int[Array, " b"]
    trail: Any
    free: Int[Array, " p"]
    free_count: Int[Array, " shards"]
    bounds: Float[Array, "p kv"] | None
    planes: dict[str, Shaped[Array, "p page"]]
    rings: Shaped[Array, "l b k r page kv"] | None
    """The rings' pages; None with `pool`, which has them."""
    pool: Shaped[Array, "p page kv"] | None
    """All entries, where there is `max_entries`."""


@jax.jit
def marked(cache: Cache) -> Mark:
    """Return a mark of the cache as it is. It holds copies: the cache may be donated."""
    ring, pages = ring_pages(cache.window, cache.page_size), cache.pages
    capped = set(PLANES) <= set(pages.planes)

    def rings(pool, table):
        return pool[table[..., :ring]]

    spec = P(None, BATCH, HEADS, None, None, None)
    held = None if capped else jax.shard_map(rings, out_specs=spec)(pages.pool, cache.layers.page_table)
    mark = Mark(
        cache.layers, cache.seen, cache.trail, pages.free, pages.free_count, pages.bounds, pages.planes, held,
        pages.pool if capped else None,
    )  # fmt: skip
    return jax.tree.map(jnp.copy, mark)


def taken_back(cache: Cache, mark: Mark) -> Cache:
    """The cache (donated, with the mark) as it was when it was marked, if nothing but tokens was run over it since, of
    all its sequences or of some: no compaction, no change of its size."""
    pool = mark.pool
    if pool is None:
        pool = _with_rings(cache.pages.pool, mark.layers.page_table, mark.rings)
    beside = {"free": mark.free, "free_count": mark.free_count, "bounds": mark.bounds, "planes": mark.planes}
    pages = dataclasses.replace(cache.pages, pool=pool, **beside)
    return dataclasses.replace(cache, pages=pages, layers=mark.layers, seen=mark.seen, trail=mark.trail)


@jax.jit(donate_argnums=0)
def _with_rings(
    pool: Shaped[Array, "p page kv"], table: Int[Array, "l b k c"], rings: Shaped[Array, "l b k r page kv"]
) -> Shaped[Array, "p page kv"]:
    def written(pool, table, rings):
        return pool.at[table[..., : rings.shape[3]]].set(rings)

    return jax.shard_map(written, out_specs=jax.typeof(pool).sharding.spec)(pool, table, rings)
