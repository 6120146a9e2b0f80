"""Compaction: drop the retained entries with the lowest scores, and free their pages.

All head caches are compacted at once, between two calls of the model. Each head, the heads of a layer or all heads
together choose by score which entries stay. The entries of each head cache then move to the front of its pages, in
order.

The functions are local to one shard, inside `shard_map`.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.pages import LayerCache, Pages, with_keys
from kvjax.struct import struct
from kvjax.topk import top


@struct
class Quota:
    """The budget of one compaction, by sequence and head cache."""

    due: Bool[Array, " b"]
    """The sequences that are compacted."""
    count: Int[Array, "l b #k"]
    """The number of eligible entries of each head cache that stay. Where heads share a budget, the sum of their numbers
    does."""
    pinned: Int[Array, "l b #k"]
    """The number of its own best entries that each head keeps in any case."""
    since: Int[Array, "l b k"]
    """The place in each head cache where the eligible entries begin. Those before it stay."""
    dropped: Int[Array, " b"]
    """The number of the newest entries of each head cache that are dropped, since their tokens were read only to
    observe the others."""
    undecided: Int[Array, " b"]
    """The number of the newest entries before the dropped ones that are not judged yet and therefore stay."""
    last: Int[Array, " b"]
    """The number of the newest entries before the dropped ones that always stay. They count towards `count`."""
    first: Int[Array, " b"]
    """The number of the first entries of each head cache that always stay. They count towards `count` too."""
    floor: Float[Array, ""]
    """The lowest score that may stay. Eligible entries with a lower score go, unless they are among `last` or
    `first`."""


def places(length: Int[Array, "*r"], entries: int) -> Int[Array, "*r s"]:
    """Return the places in each head cache of its last `entries` entries; negative where it has fewer."""
    return length[..., None] - entries + jnp.arange(entries)


def addresses(
    layer: LayerCache, place: Int[Array, "b k s"], page_size: int, ring: int
) -> tuple[Int[Array, "b k s"], Int[Array, "b k s"]]:
    """Return page and offset of places among the retained entries."""
    column = jnp.clip(ring + place // page_size, 0, layer.page_table.shape[-1] - 1)
    return jnp.take_along_axis(layer.page_table, column, 2), place % page_size


def eligible_entries(
    length: Int[Array, "*l b k"], since: Int[Array, "*l b k"], entries: int, quota: Quota
) -> Bool[Array, "*l b k s"]:
    """Return a mask over the last `entries` entries of each head cache: True if the compaction decides whether the
    entry stays. Those are the entries from place `since` on, except the newest ones that go anyway or are not judged
    yet."""
    place = places(length, entries)
    passed_over = (quota.dropped + quota.undecided)[:, None, None]
    return (place >= 0) & (place >= since[..., None]) & (length[..., None] - place > passed_over)


def forced_entries(
    length: Int[Array, "*l b k"], eligible: Bool[Array, "*l b k s"], quota: Quota
) -> Bool[Array, "*l b k s"]:
    """Return a mask of the eligible entries that stay whatever their score."""
    place = places(length, eligible.shape[-1])
    age = length[..., None] - place - quota.dropped[:, None, None]
    newest = (age > 0) & (age <= quota.last[:, None, None])
    return eligible & (newest | (place < quota.first[:, None, None]))


def scored(
    scores: Float[Array, "l b k s"], length: Int[Array, "l b k"], quota: Quota
) -> Bool[Array, "l b k s"]:
    """Return a mask that is False for entries whose score decides whether they stay but is NaN."""
    eligible = eligible_entries(length, quota.since, scores.shape[-1], quota)
    judged = eligible & ~forced_entries(length, eligible, quota) & quota.due[:, None, None]
    return ~(judged & jnp.isnan(scores))


def choose(
    scores: Float[Array, "l b k s"],
    length: Int[Array, "l b k"],
    quota: Quota,
    over: str,
    ties: str,
    head_order: tuple[tuple[int, ...], ...] | None = None,
) -> Bool[Array, "l b k s"]:
    """Return a mask of the entries that stay, aligned at the right end. over, ties, head_order: as in
    `kvjax.topk.top`."""
    place = places(length, scores.shape[-1])
    exists, newest = place >= 0, length[..., None] - place <= quota.dropped[:, None, None]
    eligible = eligible_entries(length, quota.since, scores.shape[-1], quota)
    kept = exists & ~eligible & ~newest
    forced = forced_entries(length, eligible, quota)
    eligible &= forced | ~(scores < quota.floor)
    scores = jnp.where(forced, jnp.inf, scores)
    scores = jnp.where(top(scores, eligible, quota.pinned, "head"), jnp.inf, scores)
    chosen = top(scores, eligible, quota.count, over, ties, head_order)
    # ties "out" is a threshold, which could drop pinned entries
    chosen |= eligible & (scores == jnp.inf) & (ties == "out")
    return jnp.where(quota.due[:, None, None], chosen | kept, exists)


def moved(
    pages: Pages, layers: LayerCache, chosen: Bool[Array, "l b k s"], ring: int
) -> tuple[Pages, LayerCache]:
    """Move the chosen entries to the front of their head caches, and free the pages that a head cache no longer needs.
    Head caches may not share pages."""
    entries, (capacity, page_size, _) = chosen.shape[-1], pages.pool.shape
    length = chosen.sum(-1, dtype=jnp.int32)
    column = jnp.arange(layers.page_table.shape[-1]) - ring
    begin, stop = (-(-x // page_size)[..., None] for x in (length, layers.length))
    given_up, table = (column >= begin) & (column < stop), layers.page_table

    def move(carry, xs):
        (stored, bounds), (layer, chosen) = carry, xs
        place = places(layer.length, entries)
        target = jnp.cumsum(chosen, -1, dtype=jnp.int32) - 1
        page, offset = addresses(layer, target, page_size, ring)
        source = addresses(layer, place, page_size, ring)
        if bounds is not None:
            current = dataclasses.replace(pages, pool=stored[0], metadata=stored[1])
            moved = current.entries(*source, layer.key_scale)
            bounds = with_keys(bounds, jnp.where(chosen, page, capacity), moved)
        page = jnp.where(chosen & ((page != source[0]) | (offset != source[1])), page, capacity)
        stored = jax.tree.map(lambda x: x.at[page, offset].set(x[source], mode="drop"), stored)
        return (stored, bounds), None

    # only the bounds of these head caches: the pool may hold pages of other sequences
    unbounded = jax.tree.map(lambda bounds: bounds.at[table].set(jnp.inf, mode="drop"), pages.bounds)
    stored = pages.pool, pages.metadata
    ((pool, metadata), bounds), _ = lax.scan(move, (stored, unbounded), (layers, chosen))
    pages = dataclasses.replace(pages, pool=pool, bounds=bounds, metadata=metadata)
    pages, table = released(pages, table, given_up)
    return pages, dataclasses.replace(layers, page_table=table, length=length)


def released(
    pages: Pages, table: Int[Array, "l b k c"], given_up: Bool[Array, "l b k c"]
) -> tuple[Pages, Int[Array, "l b k c"]]:
    """Return the pages and the page table after the pages in its `given_up` columns were freed. No other head cache may
    hold them."""
    capacity, count = pages.pool.shape[0], pages.free_count
    is_given_up = jnp.zeros(capacity, bool).at[jnp.where(given_up, table, capacity)].set(True, mode="drop")
    # a debt must stay negative, or the host would not see it
    freed = is_given_up & (count >= 0)
    place = jnp.where(freed, count + jnp.cumsum(freed, dtype=jnp.int32) - 1, capacity)
    free = pages.free.at[place].set(jnp.arange(capacity, dtype=jnp.int32), mode="drop")
    pages = dataclasses.replace(pages, free=free, free_count=count + freed.sum(dtype=jnp.int32))
    return pages, jnp.where(given_up, capacity, table)
