"""Forks: sequences that continue one context and share its pages.

`selected` makes a cache of chosen sequences, any of them several times. It copies no page; each page counts the head
caches that hold it. Before a fork runs, it gets its own copies of the shared pages that it may write to: those of its
local window and of its newest entries, or all of them where a compaction may move any entry. All other pages of a
context are only read, and are freed when the last fork is gone.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from kvjax.cache.pages import Cache, LayerCache, Pages, ring_pages
from kvjax.mesh import BATCH, SHARDS, P


def selected(cache: Cache, index: Int[Array, " n"]) -> Cache:
    """Return a cache whose sequence i is a fork of sequence `index[i]`, counted within its own batch shard, or empty
    where that is negative. Pages that no sequence holds any more are free. `cache` stays as it is, and the result
    shares the memory of its pool: pass it to `copy_shared_pages` before anything is written to it."""
    layers, seen, (observations, origin, hidden), sliding, held = _selected(cache, index)
    pages = dataclasses.replace(cache.pages, free=held[0], free_count=held[1], others=held[2])
    own = {"seen": seen, "origin": jnp.minimum(origin, seen), "observations": observations}
    return dataclasses.replace(cache, pages=pages, layers=layers, sliding=sliding, hidden=hidden, **own)


@jax.jit
def _selected(cache, index):
    pages = cache.pages.pool.shape[0] // cache.pages.free_count.shape[0]

    def local(*rows):
        return branched_rows(*rows, pages=pages)

    small = cache.layers, cache.seen, (cache.observations, cache.origin, cache.hidden), cache.sliding
    specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, small)
    specs = *specs, (P(SHARDS), P(SHARDS), P(SHARDS))
    return jax.shard_map(local, out_specs=specs)(*small, jax.sharding.reshard(index, P(BATCH)))


def branched_rows(
    layers: LayerCache,
    seen: Int[Array, " b"],
    observations: Any,
    sliding: Any,
    index: Int[Array, " n"],
    *,
    pages: int,
) -> tuple[
    LayerCache, Int[Array, " n"], Any, Any, tuple[Int[Array, " p"], Int[Array, " 1"], Int[Array, " p"]]
]:
    """Return a shard's state of the sequences that `index` names, given its number of pages, and its free list, the
    count of that, and how many head caches hold each page beside the first. `observations`: any arrays `[b …]`."""

    def of(x: Array, axis: int) -> Array:
        return jnp.take(x, jnp.maximum(index, 0), axis)

    exists = index >= 0
    layers = jax.tree.map(lambda x: of(x, 1), layers)
    table = jnp.where(exists[:, None, None], layers.page_table, pages)
    length = jnp.where(exists[:, None], layers.length, 0)
    owners = jnp.zeros(pages, jnp.int32).at[table].add(1, mode="drop")
    free = jnp.argsort(owners > 0, stable=True).astype(jnp.int32)
    held = free, pages - (owners > 0).sum(dtype=jnp.int32)[None], jnp.maximum(owners - 1, 0)
    layers = dataclasses.replace(layers, page_table=table, length=length)
    observations, sliding = (
        jax.tree.map(lambda x: of(x, 0), observations),
        jax.tree.map(lambda x: of(x, 1), sliding),
    )
    return layers, jnp.where(exists, of(seen, 0), 0), observations, sliding, held


def copy_shared_pages(cache: Cache, newest: int | None) -> Cache:
    """Return the cache (donated, if jitted so) in which each head cache has its own copies of the pages of its local
    window and of its `newest` entries (None: of all entries). Of the head caches that share such a page, one keeps it
    and the others get copies. If the pool has too few pages for them, the free count is negative."""
    ring = ring_pages(cache.window, cache.page_size)

    def local(pages, layers):
        return with_copies(pages, layers, ring, newest)

    specs = jax.tree.map(lambda leaf: jax.typeof(leaf).sharding.spec, (cache.pages, cache.layers))
    pages, layers = jax.shard_map(local, out_specs=specs)(cache.pages, cache.layers)
    return dataclasses.replace(cache, pages=pages, layers=layers)


def with_copies(pages: Pages, layers: LayerCache, ring: int, newest: int | None) -> tuple[Pages, LayerCache]:
    """Do what `copy_shared_pages` does, on one shard whose local windows take up to `ring` pages each."""
    assert pages.others is not None
    (none, page_size, _), table, length = pages.pool.shape, layers.page_table, layers.length
    columns = table.shape[-1]
    column = jnp.broadcast_to(jnp.arange(columns), table.shape)
    if newest is not None:
        # the pages of the local window, of the newest entries, and of the next entry
        first = ring + jnp.maximum(length - newest, 0) // page_size
        count = min(-(-newest // page_size) + 1, columns - ring)
        column = jnp.concatenate([column[..., :ring], first[..., None] + jnp.arange(count)], -1)
    page = jnp.take_along_axis(table, jnp.minimum(column, columns - 1), 3)
    page = jnp.where(column < columns, page, none)
    row = jnp.broadcast_to(jnp.arange(length.size).reshape(*length.shape, 1), page.shape)
    keeper = jnp.full(none, length.size).at[page].min(row, mode="drop")
    leaves = (page < none) & (keeper.at[page].get(mode="clip") != row)
    at = pages.free_count[0] - jnp.cumsum(leaves, dtype=jnp.int32).reshape(leaves.shape)
    fresh = jnp.where(leaves & (at >= 0), pages.free[jnp.maximum(at, 0)], none)

    def copied(x: Shaped[Array, "p ..."]) -> Shaped[Array, "p ..."]:
        return x.at[fresh].set(x.at[page].get(mode="clip"), mode="drop")

    # free pages still have the bounds of sequences that are gone, which would mix with those of new keys
    unheld = jnp.zeros(none, bool).at[pages.free].set(jnp.arange(none) < pages.free_count[0])
    bounds = jax.tree.map(lambda x: jnp.where(unheld[:, None], jnp.inf, x), pages.bounds)
    pool, bounds, metadata = jax.tree.map(copied, (pages.pool, bounds, pages.metadata))
    others = pages.others.at[jnp.where(leaves, page, none)].add(-1, mode="drop")
    l, b, k = (x[..., None] for x in jnp.ogrid[: table.shape[0], : table.shape[1], : table.shape[2]])
    table = table.at[l, b, k, jnp.where(leaves, column, columns)].set(fresh, mode="drop")
    count = pages.free_count - leaves.sum(dtype=jnp.int32)
    beside = {"bounds": bounds, "metadata": metadata, "others": others, "free_count": count}
    return dataclasses.replace(pages, pool=pool, **beside), dataclasses.replace(layers, page_table=table)


def with_own(
    pages: Pages, table: Int[Array, "l b k c"], wanted: Bool[Array, "l b k c"]
) -> tuple[Pages, Int[Array, "l b k c"]]:
    """Return a shard's pages and the page table of head caches, of which no two share a page, with copies of those
    pages in the `wanted` columns that other head caches hold, too. If the pool has too few pages for them, the free
    count is negative."""
    assert pages.others is not None
    none = pages.pool.shape[0]
    page = jnp.where(wanted, table, none)
    leaves = (page < none) & (pages.others.at[page].get(mode="clip") > 0)
    at = pages.free_count[0] - jnp.cumsum(leaves.reshape(-1), dtype=jnp.int32).reshape(leaves.shape)
    fresh = jnp.where(leaves & (at >= 0), pages.free[jnp.maximum(at, 0)], none)
    contents = {"pool": pages.pool, "bounds": pages.bounds, "metadata": pages.metadata}
    contents = jax.tree.map(lambda x: x.at[fresh].set(x.at[page].get(mode="clip"), mode="drop"), contents)
    others = pages.others.at[jnp.where(leaves, page, none)].add(-1, mode="drop")
    count = pages.free_count - leaves.sum(dtype=jnp.int32)
    pages = dataclasses.replace(pages, others=others, free_count=count, **contents)
    return pages, jnp.where(leaves, fresh, table)
