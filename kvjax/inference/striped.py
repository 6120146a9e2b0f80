"""Attention over rows that are split by pages (`kvjax.cache.stripes`): every device's share of them for all queries,
merged by log-sum-exp where the queries are; and what leaves the rings, written by the devices whose pages it comes to.

A decoded token takes two collectives a layer: its queries and what leaves the rings go to all devices together, and
what they found comes back. Many tokens go in parts, since all devices' queries are as many times as large.

Local to one shard, inside `shard_map`.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from kvjax.cache import Pages
from kvjax.cache.pages import Stripes
from kvjax.cache.stripes import append, own_length, to_all, to_own
from pallas_kernels.ordering import after
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.softmax import merge

PART = 1024
"""Tokens whose queries are on all devices at a time, where they divide a call's."""


def attended(
    q: Float[Array, "b n t h"],
    near: tuple[Float[Array, "b n t h"], Float[Array, "b n t"]],
    pages: Pages,
    stripes: Stripes,
    out: Float[Array, "b k t kv"],
    stays: Bool[Array, "b k t"],
    *,
    write: bool,
    implementation: str | None,
) -> tuple[Float[Array, "b n t h"], Float[Array, "b n t"], Pages, Stripes]:
    """Attention over what is near, which is given, and what is stored, in float32; and what leaves the rings and stays
    written, if it is to be."""
    tokens = q.shape[2]
    size = PART if tokens % PART == 0 else tokens
    together = tokens == 1 and write

    def part(index, carry):
        o, lse = carry

        def of(x):
            return lax.dynamic_slice_in_dim(x, index * size, size, 2)

        found = _stored(to_all(of(q)), pages, stripes, implementation)
        merged = _merged(of(o), of(lse), *found)
        return tuple(
            lax.dynamic_update_slice_in_dim(x, new, index * size, 2)
            for x, new in zip(carry, merged, strict=True)
        )

    if together:
        q, out, stays = _packed_to_all(q, out, stays)
        o, lse = _merged(*near, *_stored(q, pages, stripes, implementation))
    else:
        o, lse = lax.fori_loop(0, tokens // size, part, near)
    if not write:
        return o, lse, pages, stripes
    # the pool is written after it was read: else XLA copies all of it
    stripes = dataclasses.replace(stripes, length=after(stripes.length, o))
    if together:
        return o, lse, *append(pages, stripes, out, stays)

    def appended(index, carry):
        some = (lax.dynamic_slice_in_dim(x, index * size, size, 2) for x in (out, stays))
        return append(*carry, *map(to_all, some))

    return o, lse, *lax.fori_loop(0, tokens // size, appended, (pages, stripes))


def _stored(q, pages, stripes, implementation):
    """What each device's pages give of the attention of this device's own heads. q: of all heads."""
    own = own_length(stripes.length, pages.pool.shape[1])
    o, lse = paged_decode(
        q, pages.pool, stripes.page_table, own, dtype=jnp.float32, implementation=implementation
    )
    if q.shape[2] > 1:
        return to_own(o), to_own(lse)
    found = to_own(jnp.concatenate([o, lse[..., None]], -1))
    return found[..., :-1], found[..., -1]


def _merged(o, lse, parts, lses):
    """With what each of the devices found."""
    for device in range(parts.shape[1]):
        o, lse = merge(o, lse, parts[:, device], lses[:, device])
    return o, lse


def _packed_to_all(q, out, stays):
    """All heads' queries, what leaves their rings and whether it stays, by one collective."""
    (batch, heads, tokens, _), width = out.shape, q.shape[-1]
    grouped = q.reshape(batch, heads, -1, tokens, width).swapaxes(2, 3).reshape(batch, heads, tokens, -1)
    sent = to_all(jnp.concatenate([grouped, out.astype(q.dtype), stays[..., None].astype(q.dtype)], -1))
    grouped, out, stays = jnp.split(sent, [sent.shape[-1] - 2 * width - 1, sent.shape[-1] - 1], -1)
    q = grouped.reshape(batch, sent.shape[1], tokens, -1, width).swapaxes(2, 3)
    return q.reshape(batch, -1, tokens, width), out, stays[..., 0] > 0.5
