"""Head caches of at most `max_entries` entries: each keeps the tokens of highest priority among those that left the
window. Of equal priorities it keeps the earlier tokens.

A dropped token never returns, so a full head cache only ever swaps its worst entry for a better one. The new entry
takes the place of the old one, so the entries are in no order. Two kinds of entry metadata hold the priority and the
position of each.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.pages import LayerCache, Pages
from pallas_kernels import vertical_slash as attention
from pallas_kernels.running_topk import running_topk

PRIORITY, POSITION = "priority", "position"
METADATA = {PRIORITY: "float32", POSITION: "int32"}
"""Names and dtypes of the entry metadata of such a cache."""


class Turnover(NamedTuple):
    """The changes that a call's tokens make to a layer's retained entries."""

    stays: Bool[Array, "b k t"]
    """Mask over the oldest `t` tokens of window and call: True if the token is retained when it leaves the window."""
    gone: Bool[Array, "b k s"] | None = None
    """Mask over the stored entries, by place: True if a new entry takes the place. At most as many are True as tokens
    stay. None if there is no limit."""


class StoredEntries(NamedTuple):
    """The priorities and positions of a layer's stored entries, by place. They are unspecified where no entry
    exists."""

    exists: Bool[Array, "b k s"]
    priority: Float[Array, "b k s"]
    """The priority that the entry was admitted with."""
    position: Int[Array, "b k s"]
    """The position of its token, from 0."""


def stored_entries(pages: Pages, layer: LayerCache, ring: int) -> StoredEntries:
    """Return the priorities and positions of the stored entries. ring: the number of pages of the local window."""
    table = layer.page_table[..., ring:]
    place = jnp.arange(table.shape[-1] * pages.pool.shape[1])
    priority, position = (
        pages.metadata[name].at[table].get(mode="clip").reshape(*table.shape[:2], -1)
        for name in (PRIORITY, POSITION)
    )
    return StoredEntries(place < layer.length[..., None], priority, position)


def swap_worst(
    stored: StoredEntries,
    length: Int[Array, "b k"],
    max_entries: Int[Array, "..."],
    wanted: Bool[Array, "b k"],
    priority: Float[Array, "b k"],
) -> Turnover:
    """Return the turnover of one token that leaves the window. A `wanted` token is retained if there is a free place or
    an entry of lower priority, whose place it takes."""
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
    """Return `end` of `vertical_slash` for keys that stay after they left the window as long as they are `wanted` and
    among the `max_entries` keys of highest priority so far (KVPOP, App. C).

    Args:
        max_entries: one number, or one for each head cache; None: no limit.
        exists: False for keys that no query sees; None: all exist.
        position: positions of the keys; of equal priorities the lower position stays. None: the keys are in order.
        queries: the number of last indices that are queries; None: all.
    """
    wanted = wanted if exists is None else wanted & exists
    if max_entries is None:
        end = attention.ends(wanted, window)
    else:
        index = jnp.broadcast_to(jnp.arange(priority.shape[-1], dtype=jnp.int32), priority.shape)
        keys = -priority, index if position is None else position, index
        order = lax.sort(keys, num_keys=2)[2]
        rank = jnp.argsort(order, axis=-1).astype(jnp.int32)
        limits = jnp.broadcast_to(max_entries, priority.shape[:2])
        _, end = running_topk(rank, k=limits, window=window, queries=queries, competes=wanted)
        end = jnp.where(wanted, end, index + window)
    return end if exists is None else jnp.where(exists, end, 0)
