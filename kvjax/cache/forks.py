"""Forks: sequences that continue one context and share its pages.

`selected` makes a cache of chosen sequences, any of them several times. It copies no page; each page counts the head
caches that hold it. Before a fork runs, it gets its own copies of the shared pages that it may write to: those of its
local window and the page of its next entry, or all of them if the policy rewrites retained entries. All other pages of
a context are only read, and are freed when the last fork is gone.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from kvjax.cache.pages import Cache, LayerCache, Pages, ring_pages
from kvjax.mesh import BATCH, SHARDS, P, specs_of


def selected(cache: Cache, index: Int[Array, " n"]) -> Cache:
    """Return a cache whose sequence i is a fork of sequence `index[i]`. An index counts within its batch shard; a
    negative one gives an empty sequence. Pages that no sequence holds any more are free. `cache` stays as it is, and
    the result shares the memory of its pool: pass it to `copy_shared_pages` before anything is written to it."""
    layers, seen, (observations, origin, dropped), sliding, (free, free_count, others) = _selected(
        cache, index
    )
    pages = dataclasses.replace(cache.pages, free=free, free_count=free_count, others=others)
    state = {"seen": seen, "origin": jnp.minimum(origin, seen), "observations": observations}
    return dataclasses.replace(
        cache, pages=pages, layers=layers, sliding=sliding, dropped_slots=dropped, **state
    )


@jax.jit
def _selected(cache, index):
    pages = cache.pages.pool.shape[0] // cache.pages.free_count.shape[0]

    def local(*arguments):
        return forked_sequences(*arguments, pages=pages)

    by_sequence = cache.observations, cache.origin, cache.dropped_slots
    sequences = cache.layers, cache.seen, by_sequence, cache.sliding
    specs = *specs_of(sequences), (P(SHARDS), P(SHARDS), P(SHARDS))
    return jax.shard_map(local, out_specs=specs)(*sequences, jax.sharding.reshard(index, P(BATCH)))


def forked_sequences(
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
    """Return one shard's state of the sequences that `index` names, and its free list, free count and `Pages.others`.

    Args:
        observations: any arrays `[b …]`.
        sliding: any arrays `[l b …]`.
        pages: the shard's number of pages.
    """

    def taken(x: Array, axis: int) -> Array:
        return jnp.take(x, jnp.maximum(index, 0), axis)

    exists = index >= 0
    layers = jax.tree.map(lambda x: taken(x, 1), layers)
    table = jnp.where(exists[:, None, None], layers.page_table, pages)
    length = jnp.where(exists[:, None], layers.length, 0)
    owners = jnp.zeros(pages, jnp.int32).at[table].add(1, mode="drop")
    free = jnp.argsort(owners > 0, stable=True).astype(jnp.int32)
    free_count = pages - (owners > 0).sum(dtype=jnp.int32)[None]
    layers = dataclasses.replace(layers, page_table=table, length=length)
    observations = jax.tree.map(lambda x: taken(x, 0), observations)
    sliding = jax.tree.map(lambda x: taken(x, 1), sliding)
    free_list = free, free_count, jnp.maximum(owners - 1, 0)
    return layers, jnp.where(exists, taken(seen, 0), 0), observations, sliding, free_list


def copy_shared_pages(cache: Cache, rewrites_entries: bool) -> Cache:
    """Return the cache in which each head cache has its own copies of the pages of its local window and of the page of
    its next entry, or of all pages if the policy `rewrites_entries`. Of the head caches that share such a page, one
    keeps it and the others get copies. If the pool has too few pages for the copies, the free count is negative. May be
    jitted with the cache donated."""
    ring = ring_pages(cache.window, cache.page_size)

    def local(pages, layers):
        return copies_of_shared_pages(pages, layers, ring, rewrites_entries)

    specs = specs_of((cache.pages, cache.layers))
    pages, layers = jax.shard_map(local, out_specs=specs)(cache.pages, cache.layers)
    return dataclasses.replace(cache, pages=pages, layers=layers)


def copies_of_shared_pages(
    pages: Pages, layers: LayerCache, ring: int, rewrites_entries: bool
) -> tuple[Pages, LayerCache]:
    """Do what `copy_shared_pages` does, on one shard whose local windows take up to `ring` pages each."""
    column, page = written_columns(pages, layers, ring, rewrites_entries)
    past_end, rows = pages.pool.shape[0], layers.length.size
    row = jnp.broadcast_to(jnp.arange(rows).reshape(*layers.length.shape, 1), page.shape)
    keeper = jnp.full(past_end, rows).at[page].min(row, mode="drop")
    # free pages still have the bounds of sequences that are gone, which must not mix with the bounds of new keys
    unheld = jnp.zeros(past_end, bool).at[pages.free].set(jnp.arange(past_end) < pages.free_count[0])
    bounds = jax.tree.map(lambda x: jnp.where(unheld[:, None], jnp.inf, x), pages.bounds)
    pages = dataclasses.replace(pages, bounds=bounds)
    pages, page = with_copies(pages, page, keeper.at[page].get(mode="clip") != row)
    return pages, dataclasses.replace(layers, page_table=with_columns(layers.page_table, column, page))


def copies_where(
    pages: Pages, table: Int[Array, "l b k c"], wanted: Bool[Array, "l b k c"]
) -> tuple[Pages, Int[Array, "l b k c"]]:
    """Return a shard's pages and the page table of some head caches, after the shared pages in the `wanted` columns
    were copied. No two of these head caches may share a page with each other. If the pool has too few pages for the
    copies, the free count is negative."""
    assert pages.others is not None
    return with_copies(pages, table, wanted & (pages.others.at[table].get(mode="clip") > 0))


def written_columns(
    pages: Pages, layers: LayerCache, ring: int, rewrites_entries: bool
) -> tuple[Int[Array, "l b k n"], Int[Array, "l b k n"]]:
    """Return the columns of the page tables whose pages a sequence may write to, and these pages: those of the local
    window and that of the next entry, or all of them if the policy `rewrites_entries`. A column without a page has an
    index past the pool's end."""
    (past_end, page_size, _), table, length = pages.pool.shape, layers.page_table, layers.length
    columns = table.shape[-1]
    column = jnp.broadcast_to(jnp.arange(columns), table.shape)
    if not rewrites_entries:
        of_next_entry = (ring + length // page_size)[..., None]
        column = jnp.concatenate([column[..., :ring], of_next_entry], -1)
    page = jnp.take_along_axis(table, jnp.minimum(column, columns - 1), 3)
    return column, jnp.where(column < columns, page, past_end)


def with_copies(
    pages: Pages, page: Int[Array, "l b k n"], wanted: Bool[Array, "l b k n"]
) -> tuple[Pages, Int[Array, "l b k n"]]:
    """Return a shard's pages after the `wanted` ones of `page` were copied to free pages and lost one holder each, and
    `page` with the copies in their places. If too few pages are free, the free count is negative."""
    assert pages.others is not None
    past_end = pages.pool.shape[0]
    wanted = wanted & (page < past_end)
    place = pages.free_count[0] - jnp.cumsum(wanted, dtype=jnp.int32).reshape(wanted.shape)
    copy = jnp.where(wanted & (place >= 0), pages.free[jnp.maximum(place, 0)], past_end)

    def copied(x: Shaped[Array, "p ..."]) -> Shaped[Array, "p ..."]:
        return x.at[copy].set(x.at[page].get(mode="clip"), mode="drop")

    others = pages.others.at[jnp.where(wanted, page, past_end)].add(-1, mode="drop")
    count = pages.free_count - wanted.sum(dtype=jnp.int32)
    contents = jax.tree.map(copied, pages.contents)
    pages = dataclasses.replace(pages, others=others, free_count=count, **contents)
    return pages, jnp.where(wanted, copy, page)


def with_columns(
    table: Int[Array, "l b k c"], column: Int[Array, "l b k n"], page: Int[Array, "l b k n"]
) -> Int[Array, "l b k c"]:
    """Return the page table with these pages in these columns. Columns past its end are dropped."""
    l, b, k = (x[..., None] for x in jnp.ogrid[: table.shape[0], : table.shape[1], : table.shape[2]])
    return table.at[l, b, k, column].set(page, mode="drop")
