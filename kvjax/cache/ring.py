"""The ring and the global region of a row, on one shard and in one layer.

A token is written to its rows' rings; when it leaves the ring (`window − 1` tokens later: with the query itself a query
then sees `window` tokens) it is copied to the global region of each row that keeps it, and nowhere else. Both take
pages as they fill. A pool that runs out is counted, not overwritten: the free count is then negative.

With `max_entries` (`kvjax.cache.max_entries`) a token may take the place of one that was stored.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.cache.max_entries import POSITION, PRIORITY, Turnover
from kvjax.cache.pages import LayerCache, Pages, ring_pages, with_keys
from kvjax.cache.planes import appended, in_front, placed
from kvjax.errors import UserError


def ring_entries(
    pages: Pages, layer: LayerCache, seen: Int[Array, " b"], count: int, window: int, first: int = 0
) -> tuple[Float[Array, "b k r kv"], Bool[Array, "b r"]]:
    """`count` of the `window − 1` ring tokens in order of position, from the `first` oldest one on, and which of them
    exist."""
    slots, page_size = window - 1, pages.pool.shape[1]
    index = first + jnp.arange(count)
    slot = (seen[:, None] + index) % max(slots, 1)
    page = jnp.take_along_axis(layer.page_table, (slot // page_size)[:, None], 2)
    kv = pages.entries(page, (slot % page_size)[:, None])
    return kv, index >= slots - seen[:, None]


def ring_priority(
    layer: LayerCache,
    seen: Int[Array, " b"],
    priority: Float[Array, "b k t"],
    valid: Int[Array, " b"],
    delay: int,
) -> Float[Array, "b k rt"]:
    """The priorities of the ring's tokens in order and, behind them, of the `t` tokens of this call."""
    slots, ring = layer.priority.shape[-1], in_order(layer.priority, seen)
    if not 0 <= delay <= slots:
        raise UserError(
            f"priorities that are known {delay} tokens late need a window of more, got {slots + 1}"
        )
    both = jnp.concatenate([ring, jnp.full_like(priority, jnp.nan)], -1)
    tokens = priority.shape[-1]
    before = both[..., slots - delay : slots - delay + tokens]
    known = (jnp.arange(tokens) < valid[:, None, None]) & ~jnp.isnan(priority)
    return both.at[..., slots - delay : slots - delay + tokens].set(jnp.where(known, priority, before))


def in_order(by_slot: Shaped[Array, "b k r"], seen: Int[Array, " b"]) -> Shaped[Array, "b k r"]:
    """Numbers of the ring's tokens, the oldest first."""
    slots = by_slot.shape[-1]
    order = (seen[:, None] + jnp.arange(slots)) % max(slots, 1)
    return jnp.take_along_axis(by_slot, order[:, None], 2)


def leaving(seen: Int[Array, " b"], valid: Int[Array, " b"], tokens: int, window: int) -> Bool[Array, "b t"]:
    """Return a mask over the oldest `tokens` tokens of window and call, in order: True if the token leaves the window
    when the call's first `valid` enter it."""
    index = jnp.arange(tokens)
    return (index < valid[:, None]) & (index >= window - 1 - seen[:, None])


def push(
    pages: Pages,
    layer: LayerCache,
    kv: Float[Array, "b k t kv"],
    priority: Float[Array, "b k rt"],
    turnover: Turnover,
    numbers: dict[str, Shaped[Array, "b k t"]],
    seen: Int[Array, " b"],
    valid: Int[Array, " b"],
    window: int,
) -> tuple[Pages, LayerCache]:
    """Write this call's first `valid` tokens of each sequence: they enter the ring, as many leave it, and those of
    them that are kept enter the global region.

    `priority` is as from `ring_priority`. `numbers` are the planes' of this call's tokens, of planes that
    are written; they go where their tokens go.
    """
    batch, heads, tokens, _ = kv.shape
    slots, page_size, capacity = window - 1, pages.pool.shape[1], pages.pool.shape[0]
    leaving_from_ring = min(tokens, slots)
    old, _ = ring_entries(pages, layer, seen, leaving_from_ring, window)
    outgoing = jnp.concatenate([old, kv[:, :, : tokens - leaving_from_ring]], 2)
    stays = turnover.stays & leaving(seen, valid, tokens, window)[:, None]
    had = layer.length
    pages, layer, place = _allocate(pages, layer, stays, turnover.gone, seen, valid, window)
    numbers = {
        name: jnp.concatenate([in_order(old := layer.numbers[name], seen), new.astype(old.dtype)], -1)
        for name, new in numbers.items()
    }
    table = layer.page_table[..., ring_pages(window, page_size) :]
    position = jnp.broadcast_to((seen[:, None] - slots + jnp.arange(tokens))[:, None], stays.shape)
    written = numbers | ({POSITION: position} if POSITION in pages.planes else {})
    if turnover.gone is None:
        planes = {
            name: appended(
                pages.planes[name], table, had, in_front(x[..., :tokens], stays), layer.length - had
            )
            for name, x in written.items()
        }
    else:
        written |= {PRIORITY: priority}
        planes = {
            name: placed(pages.planes[name], table, place, x[..., :tokens]) for name, x in written.items()
        }
    column = ring_pages(window, page_size) + place // page_size
    column = jnp.minimum(column, layer.page_table.shape[-1] - 1)
    slot = jnp.where(stays, jnp.take_along_axis(layer.page_table, column, 2), capacity), place % page_size

    # newest tokens into the ring: the last min(t, slots) valid ones, each in the slot of its position
    entering = jnp.arange(leaving_from_ring) + valid[:, None] - leaving_from_ring
    ring_slot = (seen[:, None] + entering) % max(slots, 1)
    ring_page = jnp.take_along_axis(layer.page_table, (ring_slot // page_size)[:, None], 2)
    ring_page = jnp.where(entering[:, None] >= 0, ring_page, capacity)
    ring_kv = jnp.take_along_axis(kv, jnp.maximum(entering, 0)[:, None, :, None], 2)

    shape = (batch, heads, leaving_from_ring)
    page = jnp.concatenate([slot[0], jnp.broadcast_to(ring_page, shape)], -1)
    offset = jnp.concatenate([slot[1], jnp.broadcast_to((ring_slot % page_size)[:, None], shape)], -1)
    pages = pages.with_entries(page, offset, jnp.concatenate([outgoing, ring_kv], 2))
    bounds = with_keys(pages.bounds, slot[0], outgoing.astype(pages.dtype))
    pages = dataclasses.replace(pages, bounds=bounds, planes=pages.planes | planes)

    now = seen + valid
    newest = now[:, None] - 1 - (now[:, None] - 1 - jnp.arange(slots)) % max(slots, 1)
    place = jnp.clip(newest - (seen[:, None] - slots), 0, slots + tokens - 1)
    by_slot = {name: jnp.take_along_axis(x, place[:, None], 2) for name, x in numbers.items()}
    ring = jnp.take_along_axis(priority, place[:, None], 2)
    return pages, dataclasses.replace(layer, priority=ring, numbers=layer.numbers | by_slot)


def _allocate(pages, layer, stays, gone, seen, valid, window):
    """Extend the rows of the tokens that stay, and the rings; the place of each token in its row, past its end for
    those that go."""
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
    rings = [
        jnp.broadcast_to(ring_pages(jnp.minimum(count + 1, window), page_size)[:, None], length.shape)
        for count in (seen, seen + valid)
    ]
    # of a ring and of a global region: the column behind the last page, and how many pages are missing
    had = jnp.stack([rings[0], ring - (-layer.length // page_size)], -1)
    need = jnp.stack([rings[1], ring - (-length // page_size)], -1) - had
    ends = jnp.cumsum(need.reshape(-1)).reshape(need.shape)
    index = jnp.arange(-(-tokens // page_size))
    source = pages.free_count[0] - 1 - ((ends - need)[..., None] + index)
    fresh = jnp.where(source >= 0, pages.free[jnp.maximum(source, 0)], capacity)
    target = jnp.where(index < need[..., None], had[..., None] + index, columns)
    b, k = jnp.ogrid[: need.shape[0], : need.shape[1]]
    table = layer.page_table.at[b[..., None, None], k[..., None, None], target].set(fresh, mode="drop")
    pages = dataclasses.replace(pages, free_count=pages.free_count - ends.reshape(-1)[-1])
    layer = dataclasses.replace(layer, page_table=table, length=length)
    return pages, layer, jnp.where(stays, place, columns * page_size)
