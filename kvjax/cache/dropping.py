"""Dropping a span: the tokens from one position to another leave a sequence, and their pages are freed.

The other tokens keep their keys, which encode their positions, and later tokens continue at the old position. No later
token sees the span. Memories of methods, such as H2O's attention sums and KVPOP's state, are not changed.

Retained entries are found by their positions, which are entry metadata (`Policy.positions`). A cache in which every
head cache retains all tokens gets this metadata with its first drop, since places are positions until then.

Tokens of the local window that stay are moved together, and the window counts from the oldest of them on
(`Cache.origin`). It then fills again: it always holds the last tokens that remain, so tokens before the span leave it
later than they would have. Sliding-window layers see by position, as their models do: a mask hides the slots of dropped
tokens until other tokens are written to them (`Cache.dropped_slots`).
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from kvjax.cache.checks import check_alive, free_counts
from kvjax.cache.compaction import moved, places, released
from kvjax.cache.forks import copies_where
from kvjax.cache.max_entries import POSITION
from kvjax.cache.pages import SCALE, Cache, LayerCache, Pages, ring_pages
from kvjax.cache.sizes import CapacityError, pages_of, pool_size, resize, worth_shrinking
from kvjax.cache.sliding import position_of_slot, used_slots
from kvjax.errors import UserError, whole_number
from kvjax.mesh import BATCH, HEADS, SHARDS, P, batch_shards, on_host, put, specs_of, use_mesh
from kvjax.struct import struct

_copy = jax.jit(resize, static_argnums=1)


class Span(NamedTuple):
    """Tokens of a sequence."""

    sequence: int
    """The index of the sequence."""
    start: int
    """The position of the first token."""
    end: int
    """The position after the last token."""


def without(cache: Cache, sequence: int, start: int, end: int) -> Cache:
    """Return the cache of `Cache.without`."""
    check_alive("without", cache)
    with use_mesh(cache):
        span = checked_span(cache, sequence, start, end)
        pages = cache.pages.pool.shape[0]
        pool_pages, page_bytes = pages // cache.pages.free_count.shape[0], cache.pages.nbytes // pages
        need = pool_pages - int(free_counts(cache).min())
        if cache.pages.others is not None:
            sizes = on_host(cache.layers.length)[:, [span.sequence]], on_host(cache.counted)[[span.sequence]]
            need += int(pages_of(*sizes, cache.window, cache.page_size).sum())
        size = max(pool_pages, pool_size(need, page_bytes))
        size = size if cache.limit is None else max(pool_pages, min(size, cache.limit))
        cache = drop(_copy(with_positions(cache), size), span)
        free = int(free_counts(cache).min())
        if free < 0:
            raise CapacityError(
                f"without: the pool of {size} pages a device has {-free} too few for copies of the pages that forks "
                "share: give a larger capacity"
            )
        fewer = pool_size(size - free, page_bytes)
        shrinks = cache.limit is None and worth_shrinking(size, fewer, page_bytes)
        return _copy(cache, fewer) if shrinks else cache


def checked_span(cache: Cache, sequence: int, start: int, end: int) -> Span:
    """Return the span. Raises UserError for a span that the sequence does not have or that is still observed."""
    seen = on_host(cache.seen)
    sequence = whole_number("without", "sequence", sequence, 0, len(seen) - 1)
    tokens = int(seen[sequence])
    if not tokens:
        raise UserError(f"without: sequence {sequence} is empty")
    start = whole_number("without", "start", start, 0, tokens - 1)
    end = whole_number("without", "end", end, start + 1, tokens)
    observed = max((x.shape[1] for x in jax.tree.leaves(cache.observations)), default=0)
    if end > tokens - observed and observed:
        raise UserError(
            f"without: the eviction observes the last {observed} of {tokens} tokens: end must be at most "
            f"{max(0, tokens - observed)}, got {end}"
        )
    return Span(sequence, start, end)


def with_positions(cache: Cache) -> Cache:
    """Return the cache, with the positions of its entries. Raises UserError if they are not known."""
    if POSITION in cache.pages.metadata:
        return cache
    slots, length, seen = cache.window - 1, on_host(cache.layers.length), on_host(cache.seen)
    if (length != np.maximum(seen - slots, 0)[:, None]).any():
        raise UserError(
            "without: the cache does not know the positions of its entries, some of which are gone: make it with a "
            "policy that keeps positions, such as wgkv:positions=true"
        )
    numbers = position_of_slot(slots, slots, seen).astype(np.int32)[None, :, None]
    numbers = np.broadcast_to(numbers, (*length.shape, slots))
    numbers = cache.layers.numbers | {POSITION: put(numbers, None, BATCH, HEADS, None)}
    metadata = cache.pages.metadata | {POSITION: _places_as_positions(cache)}
    return dataclasses.replace(
        cache,
        pages=dataclasses.replace(cache.pages, metadata=metadata),
        layers=dataclasses.replace(cache.layers, numbers=numbers),
    )


@jax.jit
def _places_as_positions(cache: Cache) -> Int[Array, "p page"]:
    ring = ring_pages(cache.window, cache.page_size)

    def local(pool, table):
        columns, (capacity, size, _) = table.shape[-1] - ring, pool.shape
        place = jnp.arange(columns * size, dtype=jnp.int32).reshape(columns, size)
        place = jnp.broadcast_to(place, (*table.shape[:-1], columns, size))
        return jnp.zeros((capacity, size), jnp.int32).at[table[..., ring:]].set(place, mode="drop")

    return jax.shard_map(local, out_specs=P(SHARDS, None))(cache.pages.pool, cache.layers.page_table)


@struct
class _Window:
    """The tokens of a sequence's local window that stay."""

    source: Int[Array, " r"]
    """The current slot of the token that moves to each slot."""
    left: Int[Array, ""]
    """The number of tokens that stay. They move to the first slots, the oldest first."""
    counted: Int[Array, ""]
    """The number of tokens that the window counted before."""
    moves: Bool[Array, ""]
    """True if a token leaves."""


def _window(cache: Cache, span: Span) -> _Window:
    """Return the tokens of the local window that stay. Raises UserError if the window holds tokens before the span that
    the admission has not rated yet: it would rate the wrong tokens."""
    slots, counted = cache.window - 1, int(on_host(cache.counted)[span.sequence])
    number = position_of_slot(slots, slots, np.array([counted]))[0]
    exists = number >= 0
    # all layers and heads have the same positions; without layers there is no window
    position = on_host(cache.layers.numbers[POSITION])[:, span.sequence].max((0, 1), initial=-1)
    gone = exists & (span.start <= position) & (position < span.end)
    stays = exists & ~gone
    before = exists & (position < span.end)
    unrated = np.isnan(on_host(cache.layers.priority)[:, span.sequence]).any((0, 1))
    if gone.any() and (stays & before).any() and (unrated & before).any():
        last = int(position[before & stays].max())
        raise UserError(
            f"without: the admission has not rated tokens up to {span.end - 1} yet, and those before the span up to "
            f"{last} are in the local window: drop it once they have left the window, or with them"
        )
    order = np.argsort(np.where(stays, number, np.iinfo(np.int64).max), kind="stable")
    source = order if gone.any() else np.arange(slots)
    left, counted = (put(np.int32(x)) for x in (stays.sum(), counted))
    return _Window(put(source.astype(np.int32)), left, counted, put(np.bool_(gone.any())))


def drop(cache: Cache, span: Span) -> Cache:
    """Return the cache (donated) without a span. It must have the positions of its entries. Pages that the sequence
    shares with others are copied where its entries move. If there are too few free pages for the copies, the free count
    is negative."""
    window, origin, dropped = _window(cache, span), on_host(cache.origin).copy(), cache.dropped_slots
    if window.moves:
        origin[span.sequence] = on_host(cache.seen)[span.sequence] - int(window.left)
    if cache.sliding is not None:
        slots, seen = cache.sliding.shape[3], on_host(cache.seen)[[span.sequence]]
        position = position_of_slot(slots, used_slots(cache.sliding, cache.sliding_window), seen)[0]
        mask = np.zeros((len(origin), slots), bool) if dropped is None else on_host(dropped).copy()
        mask[span.sequence] |= (position >= span.start) & (position < span.end)
        dropped = put(mask, BATCH, None)
    shard_batch = len(origin) // batch_shards()
    index = np.full(batch_shards(), -1, np.int32)
    index[span.sequence // shard_batch] = span.sequence % shard_batch
    bounds = (put(np.int32(x)) for x in (span.start, span.end))
    pages, layers = _dropped(
        cache.pages, cache.layers, put(index, BATCH), *bounds, window, window=cache.window
    )
    return dataclasses.replace(
        cache, pages=pages, layers=layers, origin=put(origin, BATCH), dropped_slots=dropped
    )


@jax.jit(donate_argnums=(0, 1), static_argnames="window")
def _dropped(
    pages: Pages,
    layers: LayerCache,
    index: Int[Array, " shards"],
    start: Int[Array, ""],
    end: Int[Array, ""],
    kept: _Window,
    *,
    window: int,
) -> tuple[Pages, LayerCache]:
    """Return pages and layers after a drop. index: the index of the sequence within its batch shard, negative in the
    other shards."""

    def local(pages, layers, index, start, end, kept):
        is_local, index = index[0] >= 0, jnp.maximum(index[0], 0)
        sequence = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, index, 1, 1), layers)
        pages, sequence = _without_entries(pages, sequence, is_local, start, end, kept.moves, window)
        if window > 1:
            pages, sequence = _with_window(pages, sequence, is_local, kept, window)
        layers = jax.tree.map(
            lambda x, new: lax.dynamic_update_slice_in_dim(x, new, index, 1), layers, sequence
        )
        return pages, layers

    specs = specs_of((pages, layers))
    return jax.shard_map(local, out_specs=specs)(pages, layers, index, start, end, kept)


def _without_entries(
    pages: Pages,
    layers: LayerCache,
    is_local: Bool[Array, ""],
    start: Int[Array, ""],
    end: Int[Array, ""],
    window_moves: Bool[Array, ""],
    window: int,
) -> tuple[Pages, LayerCache]:
    """Return a shard's pages and one sequence without its retained entries of the span. Shared pages are copied where
    entries move. is_local: True in the shards that have the sequence."""
    page_size, table = pages.pool.shape[1], layers.page_table
    ring = ring_pages(window, page_size)
    column = jnp.arange(table.shape[-1])
    if entries := (table.shape[-1] - ring) * page_size:
        place = places(layers.length, entries)
        by_place = pages.metadata[POSITION].at[table[..., ring:]].get(mode="clip").reshape(place.shape)
        position = jnp.take_along_axis(by_place, jnp.maximum(place, 0), -1)
        gone = is_local & (place >= 0) & (position >= start) & (position < end)
        first = jnp.where(gone, place, entries).min(-1)
    else:
        gone, first = jnp.zeros((*layers.length.shape, 0), bool), jnp.zeros_like(layers.length)
    if pages.others is not None:
        moves = jnp.where(
            column < ring, is_local & window_moves, column >= ring + first[..., None] // page_size
        )
        pages, table = copies_where(pages, table, moves)
        layers = dataclasses.replace(layers, page_table=table)
    if not entries:
        return pages, layers
    return moved(pages, layers, (place >= 0) & ~gone, ring)


def _with_window(
    pages: Pages, layers: LayerCache, is_local: Bool[Array, ""], kept: _Window, window: int
) -> tuple[Pages, LayerCache]:
    """Return a shard's pages and one sequence after the window's tokens that stay were moved to the first slots."""
    capacity, page_size, _ = pages.pool.shape
    slot = jnp.arange(window - 1)
    stays = is_local & (slot < kept.left)
    stored = pages.pool, pages.metadata.get(SCALE)

    def move(stored, table):
        old, new = (jnp.take(table, x // page_size, -1) for x in (kept.source, slot))
        new = jnp.where(stays, new, capacity)
        read = old, jnp.broadcast_to(kept.source % page_size, old.shape)
        write = new, jnp.broadcast_to(slot % page_size, new.shape)
        return jax.tree.map(lambda x: x.at[write].set(x.at[read].get(mode="clip"), mode="drop"), stored), None

    (pool, scale), _ = lax.scan(move, stored, layers.page_table)
    metadata = pages.metadata if scale is None else pages.metadata | {SCALE: scale}
    column = jnp.arange(layers.page_table.shape[-1])
    pages_before, pages_after = (
        ring_pages(jnp.minimum(x + 1, window), page_size) for x in (kept.counted, kept.left)
    )
    given_up = jnp.broadcast_to(
        is_local & (column >= pages_after) & (column < pages_before), layers.page_table.shape
    )
    pages, table = released(
        dataclasses.replace(pages, pool=pool, metadata=metadata), layers.page_table, given_up
    )

    def by_slot(x):
        return jnp.where(is_local, jnp.take(x, kept.source, -1), x)

    priority = jnp.where(is_local & (slot >= kept.left), jnp.nan, by_slot(layers.priority))
    numbers = {name: by_slot(x) for name, x in layers.numbers.items()}
    return pages, dataclasses.replace(layers, page_table=table, priority=priority, numbers=numbers)
