"""`paged_decode` in XLA: a work list over rows and blocks of pages, as long as what is stored.

A row is one (sequence, kv head). Rows are sorted by length and taken a few at a time, so that neighbours in a tile are
about equally long; a tile gathers one block of columns of the page table for each. A padded gather of whole tables would
be slower than dense attention (kernels.md).
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import softmax
from pallas_kernels.blocks import divisor, even

QUERIES = 128
ENTRIES = 256
"""Largest block of queries and of entries."""

TILE = 1 << 18
"""Numbers of keys and values that a tile gathers (1 MB of float32), and twice the logits that it makes."""


def xla(q, pool, page_table, length, ring_length, ring_pages, new):
    b, n, t, h = q.shape
    heads = page_table.shape[1]
    r, g = b * heads, n // heads
    blocks, bq = even(t, QUERIES)
    q = jnp.pad(q.reshape(r, g, t, h), ((0, 0), (0, 0), (0, blocks * bq - t), (0, 0)))
    ring_length = None if ring_length is None else jnp.repeat(ring_length, heads)
    walk = _walk(pool, page_table.reshape(r, -1), length.reshape(r), ring_length, ring_pages, g * bq)

    def block(x):
        tile = lax.dynamic_slice_in_dim(q, x * bq, bq, 2).reshape(r, g * bq, h)
        state = softmax.start(tile)
        if new is not None:
            k, v = (a.reshape(r, t, h) for a in new)
            i = jnp.tile(x * bq + jnp.arange(bq), g)[:, None]
            logits = jnp.where(i >= jnp.arange(t), softmax.logits(tile, k), softmax.MASKED)
            state = softmax.update(state, logits, v)
        o, lse = softmax.finish(walk(tile, state))
        return o.reshape(r, g, bq, h).astype(q.dtype), lse.reshape(r, g, bq)

    o, lse = lax.map(block, jnp.arange(blocks))
    o = jnp.moveaxis(o, 0, 2).reshape(b, n, blocks * bq, h)[:, :, :t]
    return o, jnp.moveaxis(lse, 0, 2).reshape(b, n, blocks * bq)[:, :, :t]


def _walk(pool, page_table, length, ring_length, ring_pages, queries):
    """A function of (block of queries `[r queries h]`, state) that returns the state after all stored entries."""
    r, columns = page_table.shape
    pages, page, width = pool.shape
    h = width // 2
    ring = ring_pages * page
    if ring_length is None:
        page_table, ring, ring_length = page_table[:, ring_pages:], 0, jnp.zeros_like(length)
        columns -= ring_pages
    # Ring and global columns are neighbours: one list of entries, of which a partly filled ring leaves some out.
    entries = jnp.where(length > 0, ring + length, ring_length)
    chunks, bc = even(columns, max(1, ENTRIES // page))
    bs = bc * page
    br = divisor(r, TILE // (bs * max(width, 2 * queries)))
    page_table = jnp.pad(page_table, ((0, 0), (0, chunks * bc - columns)))
    order = jnp.argsort(-entries)
    sizes = (entries[order].reshape(-1, br)[:, 0] + bs - 1) // bs
    ends = jnp.cumsum(sizes)
    page_table, length, ring_length = page_table[order], length[order], ring_length[order]

    def walk(q, state):
        q, state = q[order], tuple(a[order] for a in state)

        def item(x, state):
            group = jnp.sum(x >= ends)
            row, chunk = group * br, x - ends[group] + sizes[group]

            def rows(a):
                return lax.dynamic_slice_in_dim(a, row, br)

            place = chunk * bs + jnp.arange(bs)
            stored = jnp.where(place < ring, place < rows(ring_length)[:, None], place - ring < rows(length)[:, None])
            table = lax.dynamic_slice(page_table, (row, chunk * bc), (br, bc))

            def side(start):
                """Keys or values alone: cutting them from gathered pages would be another pass over memory."""
                pages = jax.vmap(lambda p: lax.dynamic_slice(pool, (p, 0, start), (1, page, h)))(table.reshape(-1))
                return pages.reshape(br, bs, h)

            logits = jnp.where(stored[:, None], softmax.logits(rows(q), side(0)), softmax.MASKED)
            v = jnp.where(stored[..., None], side(h), 0)
            tile = softmax.update(tuple(rows(a) for a in state), logits, v)
            return tuple(lax.dynamic_update_slice_in_dim(a, x, row, 0) for a, x in zip(state, tile, strict=True))

        state = lax.fori_loop(0, ends[-1], item, state)
        back = jnp.argsort(order)
        return tuple(a[back] for a in state)

    return walk
