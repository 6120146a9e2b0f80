"""The attention that every stored entry got so far, for methods that evict by it (H2O)."""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import LayerCache, Pages
from kvjax.step import Step
from pallas_kernels.attention_mass import attention_mass, paged_attention_mass

ENTRIES = 4096
"""Stored entries of a row that are looked at at a time."""


def count_attention(
    pages: Pages,
    before: LayerCache,
    after: LayerCache,
    step: Step,
    lse: Float[Array, "b n t"],
    valid: Int[Array, " b"],
    chosen: Bool[Array, "b k c"] | None = None,
) -> Pages:
    """`pages` with what the first `valid` of a call's tokens paid to the entries stored before it and to each other.

    Local to one shard and layer; for caches without a ring, where every token is stored. lse: of each query's logits
    over all that it sees. chosen: the pages that were read; None: all.
    """
    assert pages.attended is not None
    capacity, page_size, _ = pages.pool.shape
    fed = jnp.arange(step.q.shape[2]) < valid[:, None]
    lse = jnp.where(fed[:, None], lse, -jnp.inf)
    q = step.q.astype(pages.dtype)
    paid = {"over": "sum", "group": "mean", "lse": lse}

    known = jnp.broadcast_to(fed[:, None], step.k.shape[:3])
    own = attention_mass(q, step.k.astype(q.dtype), valid=known, **paid)
    columns = after.page_table.shape[-1]
    attended = _with_new(pages.attended, after.page_table, before.length, own, valid)

    width = min(columns, -(-ENTRIES // page_size))
    table = before.page_table if chosen is None else jnp.where(chosen, before.page_table, capacity)
    table = jnp.pad(table, ((0, 0), (0, 0), (0, -columns % width)), constant_values=capacity)

    def block(i, attended):
        pages_of = lax.dynamic_slice_in_dim(table, i * width, width, 2)
        held = before.length - i * width * page_size
        mass = paged_attention_mass(q, pages.pool, pages_of, held, **paid)
        return attended.at[pages_of].add(mass.reshape(*pages_of.shape, page_size), mode="drop")

    blocks = -(-before.length.max() // (width * page_size))
    return dataclasses.replace(pages, attended=lax.fori_loop(0, blocks, block, attended))


def _with_new(
    attended: Float[Array, "p page"],
    page_table: Int[Array, "b k c"],
    length: Int[Array, "b k"],
    own: Float[Array, "b k t"],
    valid: Int[Array, " b"],
) -> Float[Array, "p page"]:
    """`attended` with the first `valid` tokens' own numbers, at the places from `length` on.

    By whole pages, as what is added to it later: for single numbers XLA has it in another layout on a TPU, and copies
    all of it there and back in every layer and step.
    """
    capacity, page_size = attended.shape
    columns, t = page_table.shape[-1], own.shape[-1]
    column = length[..., None] // page_size + jnp.arange((t + page_size - 2) // page_size + 1)
    token = column[..., None] * page_size + jnp.arange(page_size) - length[..., None, None]
    fed = (token >= 0) & (token < valid[:, None, None, None])
    place = jnp.clip(token, 0, t - 1).reshape(*length.shape, -1)
    new = jnp.take_along_axis(own, place, 2).reshape(token.shape)
    page = jnp.take_along_axis(page_table, jnp.minimum(column, columns - 1), 2)
    page = jnp.where(fed.any(-1) & (column < columns), page, capacity)
    rows = jnp.where(fed, new, attended.at[page].get(mode="clip"))
    return attended.at[page].set(rows, mode="drop")
