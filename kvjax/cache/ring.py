"""The local window and the retained entries of a head cache, on one shard and in one layer.

A token is written to the local windows of its head caches. It leaves the window `window − 1` tokens later, so a query
sees `window` tokens, including its own. Each head cache that retains the token then copies it to its retained entries.
Windows and retained entries take pages as they fill: `push` takes them itself, and for single tokens `reserve` takes
them for all layers at once. When the pool runs out, nothing is overwritten and the free count becomes negative.

With `max_entries` (`kvjax.cache.max_entries`) a token may take the place of a stored one.

`counted` is `Cache.counted`: it differs from the next token's position once tokens of the window were dropped.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.cache.max_entries import PRIORITY, Turnover
from kvjax.cache.metadata import appended, in_front, placed
from kvjax.cache.pages import SCALE, LayerCache, Pages, ring_pages, with_keys
from kvjax.errors import UserError
from pallas_kernels.paged_decode import Append


def ring_entries(
    pages: Pages, layer: LayerCache, counted: Int[Array, " b"], count: int, window: int, first: int = 0
) -> tuple[Float[Array, "b k r kv"], Bool[Array, "b r"]]:
    """Return `count` of the `window − 1` tokens of the local window in order of position, without the `first` oldest
    ones, and a mask of those that exist."""
    slots, index = window - 1, first + jnp.arange(count)
    at = _addresses(layer, (counted[:, None] + index) % max(slots, 1), pages.pool.shape[1])
    return pages.entries(*at, layer.key_scale), index >= slots - counted[:, None]


def _addresses(
    layer: LayerCache, slot: Int[Array, "b r"], page_size: int
) -> tuple[Int[Array, "b k r"], Int[Array, "b 1 r"]]:
    """Return page and offset of these slots of the local window."""
    page = jnp.take_along_axis(layer.page_table, (slot // page_size)[:, None], 2)
    return page, (slot % page_size)[:, None]


def ring_priority(
    layer: LayerCache,
    counted: Int[Array, " b"],
    priority: Float[Array, "b k t"],
    valid: Int[Array, " b"],
    delay: int,
) -> Float[Array, "b k rt"]:
    """Return the priorities of the local window's tokens in order, followed by those of the call's `t` tokens. An
    admission rates tokens `delay` tokens late: `priority` holds the priorities of the tokens `delay` before the
    call's."""
    slots, ring = layer.priority.shape[-1], in_order(layer.priority, counted)
    _check_delay(delay, slots)
    joined = jnp.concatenate([ring, jnp.full_like(priority, jnp.nan)], -1)
    tokens = priority.shape[-1]
    present = joined[..., slots - delay : slots - delay + tokens]
    known = (jnp.arange(tokens) < valid[:, None, None]) & ~jnp.isnan(priority)
    return joined.at[..., slots - delay : slots - delay + tokens].set(jnp.where(known, priority, present))


def _check_delay(delay: int, slots: int) -> None:
    if not 0 <= delay <= slots:
        raise UserError(
            f"priorities that are known {delay} tokens late need a window of more than {delay} tokens, "
            f"got {slots + 1}"
        )


def in_order(by_slot: Shaped[Array, "b k r"], counted: Int[Array, " b"]) -> Shaped[Array, "b k r"]:
    """Return the numbers of the local window's tokens in order, the oldest first."""
    slots = by_slot.shape[-1]
    order = (counted[:, None] + jnp.arange(slots)) % max(slots, 1)
    return jnp.take_along_axis(by_slot, order[:, None], 2)


def leaving(
    counted: Int[Array, " b"], valid: Int[Array, " b"], tokens: int, window: int
) -> Bool[Array, "b t"]:
    """Return a mask over the oldest `tokens` tokens of window and call, in order: True if the token leaves the window
    when the call's first `valid` enter it."""
    index = jnp.arange(tokens)
    return (index < valid[:, None]) & (index >= window - 1 - counted[:, None])


def push(
    pages: Pages,
    layer: LayerCache,
    kv: Float[Array, "b k t kv"],
    priority: Float[Array, "b k rt"],
    turnover: Turnover,
    numbers: dict[str, Shaped[Array, "b k t"]],
    counted: Int[Array, " b"],
    valid: Int[Array, " b"],
    window: int,
) -> tuple[Pages, LayerCache]:
    """Write a call's first `valid` tokens of each sequence: they enter the local window, the oldest tokens leave it,
    and those of the leaving tokens that stay become retained entries.

    Args:
        priority: from `ring_priority`.
        numbers: the metadata of the call's tokens, for the fields that are written. It moves with the tokens.
    """
    batch, heads, tokens, _ = kv.shape
    slots, page_size, capacity = window - 1, pages.pool.shape[1], pages.pool.shape[0]
    leaving_from_ring = min(tokens, slots)
    stored, scale = pages.as_stored(kv, layer.key_scale)
    numbers = numbers if scale is None else numbers | {SCALE: scale}
    oldest = (counted[:, None] + jnp.arange(leaving_from_ring)) % max(slots, 1)
    old = pages.pool[_addresses(layer, oldest, page_size)]
    outgoing = jnp.concatenate([old, stored[:, :, : tokens - leaving_from_ring]], 2)
    stays = turnover.stays & leaving(counted, valid, tokens, window)[:, None]
    old_length = layer.length
    pages, layer, place = _allocate(pages, layer, stays, turnover.gone, counted, valid, window)
    numbers = {
        name: jnp.concatenate([in_order(old := layer.numbers[name], counted), new.astype(old.dtype)], -1)
        for name, new in numbers.items()
    }
    table = layer.page_table[..., ring_pages(window, page_size) :]
    if turnover.gone is None:
        metadata = {
            name: appended(
                pages.metadata[name],
                table,
                old_length,
                in_front(x[..., :tokens], stays),
                layer.length - old_length,
            )
            for name, x in numbers.items()
        }
    else:
        metadata = {
            name: placed(pages.metadata[name], table, place, x[..., :tokens])
            for name, x in (numbers | {PRIORITY: priority}).items()
        }
    column = ring_pages(window, page_size) + place // page_size
    column = jnp.minimum(column, layer.page_table.shape[-1] - 1)
    target = jnp.where(stays, jnp.take_along_axis(layer.page_table, column, 2), capacity), place % page_size

    # newest tokens into the local window: the last min(t, slots) valid ones, each in the slot of its position
    entering = jnp.arange(leaving_from_ring) + valid[:, None] - leaving_from_ring
    ring_slot, token = (counted[:, None] + entering) % max(slots, 1), jnp.maximum(entering, 0)[:, None]
    ring_page, ring_offset = _addresses(layer, ring_slot, page_size)
    ring_page = jnp.where(entering[:, None] >= 0, ring_page, capacity)
    ring_kv = jnp.take_along_axis(stored, token[..., None], 2)

    shape = (batch, heads, leaving_from_ring)
    page = jnp.concatenate([target[0], jnp.broadcast_to(ring_page, shape)], -1)
    offset = jnp.concatenate([target[1], jnp.broadcast_to(ring_offset, shape)], -1)
    pool = pages.pool.at[page, offset].set(jnp.concatenate([outgoing, ring_kv], 2), mode="drop")
    bounds = pages.bounds
    if bounds is not None:
        of_outgoing = None if scale is None else numbers[SCALE][..., :tokens]
        bounds = with_keys(bounds, target[0], pages.as_entries(outgoing, of_outgoing, layer.key_scale))
    if scale is not None:
        place = jnp.where(entering >= 0, ring_slot, _ring_end(window, page_size))[:, None]
        new = jnp.take_along_axis(scale, token, 2)
        metadata[SCALE] = _in_ring(metadata[SCALE], layer, jnp.broadcast_to(place, shape), new, window)
    pages = dataclasses.replace(pages, pool=pool, bounds=bounds, metadata=pages.metadata | metadata)

    counted_after = counted + valid
    newest = counted_after[:, None] - 1 - (counted_after[:, None] - 1 - jnp.arange(slots)) % max(slots, 1)
    place = jnp.clip(newest - (counted[:, None] - slots), 0, slots + tokens - 1)
    by_slot = {name: jnp.take_along_axis(x, place[:, None], 2) for name, x in numbers.items()}
    ring = jnp.take_along_axis(priority, place[:, None], 2)
    return pages, dataclasses.replace(layer, priority=ring, numbers=layer.numbers | by_slot)


def _ring_end(window: int, page_size: int) -> int:
    """Return the number of slots of the local window's pages."""
    return ring_pages(window, page_size) * page_size


def _in_ring(
    field: Shaped[Array, "p page"],
    layer: LayerCache,
    slot: Int[Array, "b k r"],
    new: Shaped[Array, "b k r"],
    window: int,
) -> Shaped[Array, "p page"]:
    """Return the field after numbers of the local window's tokens were written to these slots. A number whose slot is
    past the window's pages is dropped."""
    return placed(field, layer.page_table[..., : ring_pages(window, field.shape[1])], slot, new)


class Reserved(NamedTuple):
    """Pages for one token of each sequence in all layers: one page for the local window and one for the retained
    entries."""

    page: Int[Array, "2 l b k"]
    """The index of each page. It is past the pool's end where no page is needed and where the pool ran out."""
    column: Int[Array, "2 l b k"]
    """The column of the page table that the page is for."""
    needed: Bool[Array, "2 l b k"]
    """True if a token that is written there needs a new page."""


def reserve(
    pages: Pages, layers: LayerCache, counted: Int[Array, " b"], valid: Int[Array, " b"], window: int
) -> tuple[LayerCache, Reserved]:
    """Put pages for the next token of each sequence into the tables of all layers, whether or not a token will be
    retained. `push_one` uses them, and `release_unused` takes back the others. A sequence whose `valid` is 0 has no
    next token."""
    page_size, columns = pages.pool.shape[1], layers.page_table.shape[-1]
    ring = ring_pages(window, page_size)
    window_pages, window_pages_after = (
        ring_pages(jnp.minimum(count + 1, window), page_size) for count in (counted, counted + valid)
    )
    leaves = (valid > 0) & (counted >= window - 1)
    column = ring + layers.length // page_size
    needed = jnp.stack(
        [
            jnp.broadcast_to((window_pages_after > window_pages)[:, None], column.shape),
            leaves[:, None] & (layers.length % page_size == 0) & (column < columns),
        ]
    )
    column = jnp.stack([jnp.broadcast_to(window_pages[:, None], column.shape), column])
    place = pages.free_count[0] - jnp.cumsum(needed.reshape(-1)).reshape(needed.shape)
    page = jnp.where(needed & (place >= 0), pages.free[jnp.maximum(place, 0)], pages.pool.shape[0])
    l, b, k = jnp.ogrid[: column.shape[1], : column.shape[2], : column.shape[3]]
    table = layers.page_table.at[l, b, k, jnp.where(needed, column, columns)].set(page, mode="drop")
    return dataclasses.replace(layers, page_table=table), Reserved(page, column, needed)


def release_unused(
    pages: Pages, layers: LayerCache, reserved: Reserved, length: Int[Array, "l b k"]
) -> tuple[Pages, LayerCache]:
    """Take back the unused pages that were reserved for retained entries. The pool is then as if each page had been
    taken when it was needed. If a needed page was missing, the free count is negative.

    length: the retained entries of each head cache before the token.
    """
    past_end, columns = pages.pool.shape[0], layers.page_table.shape[-1]
    used = reserved.needed & jnp.stack([jnp.ones_like(length, bool), layers.length > length])
    given = reserved.page < past_end
    unused = given & ~used
    owed = (used & ~given).sum(dtype=jnp.int32)
    kept = pages.free_count[0] - given.sum(dtype=jnp.int32)
    place = kept + jnp.cumsum(unused.reshape(-1)).reshape(unused.shape) - 1
    free = pages.free.at[jnp.where(unused, place, past_end)].set(reserved.page, mode="drop")
    l, b, k = jnp.ogrid[: length.shape[0], : length.shape[1], : length.shape[2]]
    table = layers.page_table.at[l, b, k, jnp.where(unused, reserved.column, columns)].set(
        past_end, mode="drop"
    )
    count = jnp.where(owed > 0, jnp.minimum(kept, 0) - owed, kept + unused.sum(dtype=jnp.int32))
    pages = dataclasses.replace(pages, free=free, free_count=jnp.broadcast_to(count, pages.free_count.shape))
    return pages, dataclasses.replace(layers, page_table=table)


def slot_priority(
    layer: LayerCache,
    counted: Int[Array, " b"],
    priority: Float[Array, "b k 1"],
    valid: Int[Array, " b"],
    delay: int,
) -> tuple[LayerCache, Float[Array, "b k 1"]]:
    """Record the priority that becomes known with one token: that of the token `delay` before it, or its own. Returns
    the layer, and the priority of the token that leaves the local window."""
    slots = layer.priority.shape[-1]
    _check_delay(delay, slots)
    known = (valid > 0)[:, None] & ~jnp.isnan(priority[..., 0])
    priority = jnp.where(known, priority[..., 0], jnp.nan)
    if slots == 0:
        return layer, priority[..., None]
    ring, b = layer.priority, jnp.arange(counted.shape[0])
    if delay:
        slot = (counted - delay) % slots
        ring = ring.at[b, :, slot].set(jnp.where(known, priority, ring[b, :, slot]))
        priority = jnp.full_like(priority, jnp.nan)
    slot = counted % slots
    oldest = ring[b, :, slot]
    ring = ring.at[b, :, slot].set(jnp.where((valid > 0)[:, None], priority, oldest))
    return dataclasses.replace(layer, priority=ring), oldest[..., None]


class PlaceOfOne(NamedTuple):
    """The places of one new token of each sequence, and of the token that leaves the local window."""

    append: Append
    """The slot of the new token in the pool, and the slot of the leaving one among the retained entries."""
    stays: Bool[Array, "b k"]
    """True if the token that leaves the window is retained."""
    place: Int[Array, "b k"]
    """The place of the retained token in its head cache."""
    length: Int[Array, "b k"]
    """The number of retained entries after the token."""


def place_one(
    pages: Pages,
    layer: LayerCache,
    turnover: Turnover,
    counted: Int[Array, " b"],
    valid: Int[Array, " b"],
    window: int,
) -> PlaceOfOne:
    """Return where `push_one` writes a token. Its pages must be reserved. It takes the slot of the oldest token in the
    local window, which is retained or dropped."""
    slots, (capacity, page_size, _) = window - 1, pages.pool.shape
    stays = turnover.stays[..., 0] & leaving(counted, valid, 1, window)
    place, length = layer.length, layer.length + stays
    if turnover.gone is not None:
        gone = turnover.gone.any(-1)
        place, length = jnp.where(gone, turnover.gone.argmax(-1), place), length - gone

    def entry(exists, column, offset):
        column = jnp.minimum(column, layer.page_table.shape[-1] - 1)
        page = jnp.take_along_axis(layer.page_table, column[..., None], 2)[..., 0]
        return jnp.where(exists, page, capacity) * page_size + offset

    kept = entry(stays, ring_pages(window, page_size) + place // page_size, place % page_size)
    if not slots:
        return PlaceOfOne(Append(kept, jnp.full_like(kept, capacity * page_size)), stays, place, length)
    slot = (counted % slots)[:, None]
    slot = entry((valid > 0)[:, None], slot // page_size, slot % page_size)
    return PlaceOfOne(Append(slot, kept), stays, place, length)


def push_one(
    pages: Pages,
    layer: LayerCache,
    at: PlaceOfOne,
    oldest: Float[Array, "b k 1"],
    numbers: dict[str, Shaped[Array, "b k 1"]],
    counted: Int[Array, " b"],
    valid: Int[Array, " b"],
    window: int,
) -> tuple[Pages, LayerCache]:
    """Do what `push` does, for one token whose entry is in the pool already (`paged_decode_append`): write the metadata
    of the token, and of the token that left the local window.

    Args:
        oldest: the priority of the token that left the window.
        numbers: the metadata of the new token, including its scale.
    """
    slots, page_size, b = window - 1, pages.pool.shape[1], jnp.arange(counted.shape[0])
    slot, table = counted % max(slots, 1), layer.page_table[..., ring_pages(window, page_size) :]
    place = jnp.where(at.stays, at.place, table.shape[-1] * page_size)[..., None]
    moved = {name: layer.numbers[name][b, :, slot][..., None] for name in numbers} if slots else dict(numbers)
    moved |= {PRIORITY: oldest} if PRIORITY in pages.metadata else {}
    metadata = {name: placed(pages.metadata[name], table, place, x) for name, x in moved.items()}
    if pages.int8 and slots:
        end = jnp.where(valid > 0, slot, _ring_end(window, page_size))[:, None, None]
        slots_of_heads = jnp.broadcast_to(end, place.shape)
        metadata[SCALE] = _in_ring(metadata[SCALE], layer, slots_of_heads, numbers[SCALE], window)
    pages = dataclasses.replace(pages, metadata=pages.metadata | metadata)
    if pages.bounds is not None:
        kept = (at.append.moved if slots else at.append.slot)[..., None]
        page, offset = kept // page_size, kept % page_size
        bounds = with_keys(pages.bounds, page, pages.entries(page, offset, layer.key_scale))
        pages = dataclasses.replace(pages, bounds=bounds)
    by_slot = dict(layer.numbers)
    for name, new in numbers.items() if slots else ():
        old = by_slot[name]
        kept = jnp.where((valid > 0)[:, None], new[..., 0].astype(old.dtype), old[b, :, slot])
        by_slot[name] = old.at[b, :, slot].set(kept)
    return pages, dataclasses.replace(layer, length=at.length, numbers=by_slot)


def _allocate(pages, layer, stays, gone, counted, valid, window):
    """Take pages for the tokens that stay and for the local windows. Returns pages, layer and the place of each token
    in its head cache. The place is past the head cache's end for tokens that are dropped."""
    page_size, capacity = pages.pool.shape[1], pages.pool.shape[0]
    tokens, columns, ring = stays.shape[-1], layer.page_table.shape[-1], ring_pages(window, page_size)
    rank = jnp.cumsum(stays, -1, dtype=jnp.int32) - 1
    if gone is None:
        place, length = layer.length[..., None] + rank, layer.length + stays.sum(-1, dtype=jnp.int32)
    else:
        freed = gone.sum(-1, dtype=jnp.int32)[..., None]
        all_places = jnp.broadcast_to(jnp.arange(gone.shape[-1], dtype=jnp.int32), gone.shape)
        vacant = in_front(all_places, gone)
        vacant = jnp.take_along_axis(vacant, jnp.clip(rank, 0, max(gone.shape[-1] - 1, 0)), 2)
        place = jnp.where(rank < freed, vacant, layer.length[..., None] + rank - freed)
        length = layer.length + stays.sum(-1, dtype=jnp.int32) - freed[..., 0]
    window_pages = [
        jnp.broadcast_to(ring_pages(jnp.minimum(count + 1, window), page_size)[:, None], length.shape)
        for count in (counted, counted + valid)
    ]
    # for local window and retained entries: the column after the last page, and the number of missing pages
    column = jnp.stack([window_pages[0], ring - (-layer.length // page_size)], -1)
    need = jnp.stack([window_pages[1], ring - (-length // page_size)], -1) - column
    ends = jnp.cumsum(need.reshape(-1)).reshape(need.shape)
    index = jnp.arange(-(-tokens // page_size))
    source = pages.free_count[0] - 1 - ((ends - need)[..., None] + index)
    fresh = jnp.where(source >= 0, pages.free[jnp.maximum(source, 0)], capacity)
    target = jnp.where(index < need[..., None], column[..., None] + index, columns)
    b, k = jnp.ogrid[: need.shape[0], : need.shape[1]]
    table = layer.page_table.at[b[..., None, None], k[..., None, None], target].set(fresh, mode="drop")
    pages = dataclasses.replace(pages, free_count=pages.free_count - ends.reshape(-1)[-1])
    layer = dataclasses.replace(layer, page_table=table, length=length)
    return pages, layer, jnp.where(stays, place, columns * page_size)
