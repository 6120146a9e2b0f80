"""The ring and the global region of a row, on one shard and in one layer.

A token is written to its rows' rings; when it leaves the ring (`window − 1` tokens later: with the query itself a query
then sees `window` tokens) it is copied to the global region of each row that keeps it, and nowhere else. A pool that
runs out is counted, not overwritten: the free count is then negative.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.cache.pages import LayerCache, Pages, with_keys
from kvjax.cache.planes import appended, in_front


def ring_pages(window: int, page_size: int) -> int:
    """Pages that a ring of `window − 1` slots takes."""
    return -(-(window - 1) // page_size)


def ring_entries(
    pages: Pages, layer: LayerCache, seen: Int[Array, " b"], count: int, window: int
) -> tuple[Float[Array, "b k r kv"], Bool[Array, "b r"]]:
    """The oldest `count` of the `window − 1` ring tokens in order of position, and which of them exist."""
    slots, page_size = window - 1, pages.pool.shape[1]
    index = jnp.arange(count)
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
    slots, ring = layer.priority.shape[-1], _in_order(layer.priority, seen)
    both = jnp.concatenate([ring, jnp.full_like(priority, jnp.nan)], -1)
    tokens = priority.shape[-1]
    before = both[..., slots - delay : slots - delay + tokens]
    known = (jnp.arange(tokens) < valid[:, None, None]) & ~jnp.isnan(priority)
    return both.at[..., slots - delay : slots - delay + tokens].set(jnp.where(known, priority, before))


def _in_order(by_slot: Shaped[Array, "b k r"], seen: Int[Array, " b"]) -> Shaped[Array, "b k r"]:
    """Numbers of the ring's tokens, the oldest first."""
    slots = by_slot.shape[-1]
    order = (seen[:, None] + jnp.arange(slots)) % max(slots, 1)
    return jnp.take_along_axis(by_slot, order[:, None], 2)


def push(
    pages: Pages,
    layer: LayerCache,
    kv: Float[Array, "b k t kv"],
    priority: Float[Array, "b k rt"],
    kept: Bool[Array, "b k rt"],
    numbers: dict[str, Shaped[Array, "b k t"]],
    seen: Int[Array, " b"],
    valid: Int[Array, " b"],
    window: int,
) -> tuple[Pages, LayerCache]:
    """Write this call's first `valid` tokens of each sequence: they enter the ring, as many leave it, and those of
    them that are `kept` enter the global region.

    `priority` and `kept` are as from `ring_priority`. `numbers` are the planes' of this call's tokens, of planes that
    are written; they go where their tokens go.
    """
    batch, heads, tokens, _ = kv.shape
    slots, page_size, capacity = window - 1, pages.pool.shape[1], pages.pool.shape[0]
    leaving_from_ring = min(tokens, slots)
    old, _ = ring_entries(pages, layer, seen, leaving_from_ring, window)
    leaving = jnp.concatenate([old, kv[:, :, : tokens - leaving_from_ring]], 2)
    index = jnp.arange(tokens)
    left = (index < valid[:, None]) & (index >= slots - seen[:, None])
    stays = kept[..., :tokens] & left[:, None]
    had = layer.length
    pages, layer, slot = _allocate(pages, layer, stays, ring_pages(window, page_size))
    numbers = {
        name: jnp.concatenate([_in_order(old := layer.numbers[name], seen), new.astype(old.dtype)], -1)
        for name, new in numbers.items()
    }
    table = layer.page_table[..., ring_pages(window, page_size) :]
    planes = {
        name: appended(pages.planes[name], table, had, in_front(x[..., :tokens], stays), layer.length - had)
        for name, x in numbers.items()
    }

    # newest tokens into the ring: the last min(t, slots) valid ones, each in the slot of its position
    entering = jnp.arange(leaving_from_ring) + valid[:, None] - leaving_from_ring
    ring_slot = (seen[:, None] + entering) % max(slots, 1)
    ring_page = jnp.take_along_axis(layer.page_table, (ring_slot // page_size)[:, None], 2)
    ring_page = jnp.where(entering[:, None] >= 0, ring_page, capacity)
    ring_kv = jnp.take_along_axis(kv, jnp.maximum(entering, 0)[:, None, :, None], 2)

    shape = (batch, heads, leaving_from_ring)
    page = jnp.concatenate([slot[0], jnp.broadcast_to(ring_page, shape)], -1)
    offset = jnp.concatenate([slot[1], jnp.broadcast_to((ring_slot % page_size)[:, None], shape)], -1)
    pages = pages.with_entries(page, offset, jnp.concatenate([leaving, ring_kv], 2))
    bounds = with_keys(pages.bounds, slot[0], leaving.astype(pages.dtype))
    pages = dataclasses.replace(pages, bounds=bounds, planes=pages.planes | planes)

    now = seen + valid
    newest = now[:, None] - 1 - (now[:, None] - 1 - jnp.arange(slots)) % max(slots, 1)
    place = jnp.clip(newest - (seen[:, None] - slots), 0, slots + tokens - 1)
    by_slot = {name: jnp.take_along_axis(x, place[:, None], 2) for name, x in numbers.items()}
    ring = jnp.take_along_axis(priority, place[:, None], 2)
    return pages, dataclasses.replace(layer, priority=ring, numbers=layer.numbers | by_slot)


def _allocate(pages, layer, stays, ring):
    """Extend the rows of the tokens that stay; (page, offset) of each, past the pool's end for those that go."""
    page_size, capacity = pages.pool.shape[1], pages.pool.shape[0]
    tokens = stays.shape[-1]
    rank = layer.length[..., None] + jnp.cumsum(stays, -1, dtype=jnp.int32) - 1
    length = layer.length + stays.sum(-1, dtype=jnp.int32)
    had, have = -(-layer.length // page_size), -(-length // page_size)
    need = have - had
    ends = jnp.cumsum(need.reshape(-1)).reshape(need.shape)
    column = jnp.arange(-(-tokens // page_size))
    source = pages.free_count[0] - 1 - ((ends - need)[..., None] + column)
    fresh = jnp.where(source >= 0, pages.free[jnp.maximum(source, 0)], capacity)
    columns = layer.page_table.shape[-1]
    target = jnp.where(column < need[..., None], ring + had[..., None] + column, columns)
    b, k = jnp.ogrid[: stays.shape[0], : stays.shape[1]]
    table = layer.page_table.at[b[..., None], k[..., None], target].set(fresh, mode="drop")
    page = jnp.take_along_axis(table, jnp.clip(ring + rank // page_size, 0, columns - 1), 2)
    page = jnp.where(stays, page, capacity)
    layer = dataclasses.replace(layer, page_table=table, length=length)
    pages = dataclasses.replace(pages, free_count=pages.free_count - ends.reshape(-1)[-1])
    return pages, layer, (page, rank % page_size)
