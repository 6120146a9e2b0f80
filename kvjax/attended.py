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
    q = step.q.astype(pages.pool.dtype)
    paid = {"over": "sum", "group": "mean", "lse": lse}

    known = jnp.broadcast_to(fed[:, None], step.k.shape[:3])
    own = attention_mass(q, step.k.astype(q.dtype), valid=known, **paid)
    place = before.length[..., None] + jnp.arange(fed.shape[1])
    columns = after.page_table.shape[-1]
    page = jnp.take_along_axis(after.page_table, jnp.clip(place // page_size, 0, columns - 1), 2)
    attended = pages.attended.at[jnp.where(known, page, capacity), place % page_size].set(own, mode="drop")

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
