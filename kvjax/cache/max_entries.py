"""Heads that hold at most `max_entries` entries: of the tokens that left the window, a head cache keeps the best so far
by priority, and of equal ones the earlier.

What is out stays out, so a row that is full only ever swaps its worst entry for a better one. The newcomer takes its
place: the entries of such a row are in no order, and two planes say of each what it is worth and where it stood.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.pages import LayerCache, Pages
from pallas_kernels import vertical_slash as attention
from pallas_kernels.running_topk import running_topk

PRIORITY, POSITION = "priority", "position"
PLANES = {PRIORITY: "float32", POSITION: "int32"}
"""Entry metadata of such a cache."""


class Turnover(NamedTuple):
    """Changes that a call's tokens make to a layer's retained entries."""

    stays: Bool[Array, "b k t"]
    """Mask over the oldest `t` tokens of window and call: True if the token is retained when it leaves the window."""
    gone: Bool[Array, "b k s"] | None = None
    """The stored entries whose places they take, by place; never more than stay. None: there is no limit."""


class Standing(NamedTuple):
    """The stored entries of a layer by place, unspecified where there is none."""

    exists: Bool[Array, "b k s"]
    priority: Float[Array, "b k s"]
    """The priority that the entry was admitted with."""
    position: Int[Array, "b k s"]
    """The position of its token, from 0."""


def standings(pages: Pages, layer: LayerCache, ring: int) -> Standing:
    """Return what the entry metadata says of stored entries. ring: pages of the local window."""
    table = layer.page_table[..., ring:]
    place = jnp.arange(table.shape[-1] * pages.pool.shape[1])
    priority, position = (
        pages.planes[name].at[table].get(mode="clip").reshape(*table.shape[:2], -1)
        for name in (PRIORITY, POSITION)
    )
    return Standing(place < layer.length[..., None], priority, position)


def swap_worst(
    stored: Standing,
    length: Int[Array, "b k"],
    max_entries: Int[Array, "..."],
    wanted: Bool[Array, "b k"],
    priority: Float[Array, "b k"],
) -> Turnover:
    """Return the turnover of one token that leaves the window: it is retained where it is `wanted` and has a place, or
    takes that of a worse entry."""
    lowest = jnp.where(stored.exists, stored.priority, jnp.inf).min(-1, initial=jnp.inf)
    lowest_ones = stored.exists & (stored.priority == lowest[..., None])
    newest = jnp.where(lowest_ones, stored.position, -1).max(-1, initial=-1)
    worst = lowest_ones & (stored.position == newest[..., None])
    full = length >= max_entries
    stays = wanted & (~full | (priority > lowest))
    return Turnover(stays[..., None], worst & (stays & full)[..., None])


def ends(
    wanted: Bool[Array, "b k s"],
    priority: Float[Array, "b k s"],
    max_entries: Int[Array, "..."] | None,
    *,
    window: int,
    exists: Bool[Array, "b k_or_1 s"] | None = None,
    position: Int[Array, "b k s"] | None = None,
    queries: int | None = None,
) -> Int[Array, "b k s"]:
    """`end` of `vertical_slash` for keys that stay, once they left the window, iff they are `wanted` and among the
    `max_entries` of highest priority of those so far (KVPOP, App. C).

    Args:
        max_entries: one number, or one of each row; None: no limit.
        exists: False: nobody ever sees the key. None: all exist.
        position: of equal priorities the lower one stays. None: the keys are in order.
        queries: how many of the last indices are queries; None: all.
    """
    wanted = wanted if exists is None else wanted & exists
    if max_entries is None:
        end = attention.ends(wanted, window)
    else:
        index = jnp.broadcast_to(jnp.arange(priority.shape[-1], dtype=jnp.int32), priority.shape)
        keys = -priority, index if position is None else position, index
        order = lax.sort(keys, num_keys=2)[2]
        rank = jnp.argsort(order, axis=-1).astype(jnp.int32)
        of_rows = jnp.broadcast_to(max_entries, priority.shape[:2])
        _, end = running_topk(rank, k=of_rows, window=window, queries=queries, competes=wanted)
        end = jnp.where(wanted, end, index + window)
    return end if exists is None else jnp.where(exists, end, 0)
