"""`paged_decode` in XLA: a work list of rows and blocks of pages, whose length depends on the stored entries.

A row is one (sequence, kv head). Rows are sorted by length and processed a few at a time, so that the rows of a tile
have similar lengths. A tile gathers one block of the page table's columns for each row. (Gathering whole tables, padded
to the longest, is slower than dense attention.)
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import softmax
from pallas_kernels.bits import as_floats
from pallas_kernels.blocks import divisor, even
from pallas_kernels.int8_entries import scales
from pallas_kernels.paged_decode.append import append_tokens
from pallas_kernels.paged_decode.plane import gather_pages

QUERIES = 512
"""The most queries of a block."""

ENTRIES = 256
"""The most entries of each row in a tile; a larger page is one tile. `QUERIES` and `ENTRIES` were measured on two CPU
cores: with many queries, a quarter of the former and half of the latter take twice as long."""

ROWS = 4
LOGITS = 1 << 17
"""The most rows, and about the most logits, of a tile."""


def xla(q, pool, page_table, length, ring_length, ring_pages, new, bias, scale, dtype, append=None):
    b, n, t, h = q.shape
    heads = page_table.shape[1]
    r, g = b * heads, n // heads
    blocks, bq = even(t, QUERIES)
    q = jnp.pad(q.reshape(r, g, t, h), ((0, 0), (0, 0), (0, blocks * bq - t), (0, 0)))
    ring_length = jnp.zeros(b, int) if ring_length is None else ring_length
    ring_length = jnp.broadcast_to(ring_length[:, None], length.shape)
    stored = _Stored(pool, bias, scale, page_table, length, ring_length, ring_pages, g * bq)

    def block(i):
        q_block = lax.dynamic_slice_in_dim(q, i * bq, bq, 2).reshape(r, g * bq, h)
        state = softmax.start(q_block)
        if new is not None:
            k, v = (x.reshape(r, t, h) for x in new)
            index = jnp.tile(i * bq + jnp.arange(bq), g)[:, None]
            logits = jnp.where(index >= jnp.arange(t), softmax.logits(q_block, k), softmax.MASKED)
            state = softmax.update(state, logits, v)
        o, lse = softmax.finish(stored.attend(q_block, state))
        return o.reshape(r, g, bq, h).astype(dtype), lse.reshape(r, g, bq)

    o, lse = lax.map(block, jnp.arange(blocks))
    o = jnp.moveaxis(o, 0, 2).reshape(b, n, blocks * bq, h)[:, :, :t]
    lse = jnp.moveaxis(lse, 0, 2).reshape(b, n, blocks * bq)[:, :, :t]
    return o, lse, append_tokens(pool, append, new, lse)


class _Stored:
    """The stored entries as a list of tiles: `br` rows (sorted by length) and `bs` entries of each.

    A row's ring columns (local window) and global columns (retained entries) are adjacent, so its entries form one
    list. A partly filled ring leaves gaps in it.
    """

    def __init__(self, pool, bias, scale, page_table, length, ring_length, ring_pages, queries):
        r, columns = length.size, page_table.shape[2]
        self.pool, self.bias, self.scale = pool, bias, scale
        self.page, self.h = pool.shape[1], pool.shape[2] // 2
        self.ring = ring_pages * self.page
        length, ring_length = length.reshape(r), ring_length.reshape(r)
        self.bc = max(1, min(columns, ENTRIES // self.page))
        self.bs = self.bc * self.page
        self.br = divisor(r, min(ROWS, LOGITS // (self.bs * queries)))

        start = jnp.where(ring_length > 0, 0, self.ring // self.bs)
        stop = jnp.where(length > 0, self.ring + length, ring_length)
        stop = (stop + self.bs - 1) // self.bs
        self.order = jnp.argsort(start - stop)
        self.length, self.ring_length = length[self.order], ring_length[self.order]
        table = jnp.clip(page_table.reshape(r, columns), 0, pool.shape[0] - 1)
        table = jnp.pad(table, ((0, 0), (0, -columns % self.bc)))
        self.page_table = table[self.order]
        self.first = start[self.order].reshape(-1, self.br).min(1)
        tiles = jnp.maximum(stop[self.order].reshape(-1, self.br).max(1) - self.first, 0)
        self.ends = jnp.cumsum(tiles)
        self.starts = self.ends - tiles

    def _tile(self, x, q, state):
        group = jnp.sum(x >= self.ends)
        column = self.first[group] + x - self.starts[group]

        def rows(a):
            return lax.dynamic_slice_in_dim(a, group * self.br, self.br)

        place = column * self.bs + jnp.arange(self.bs)
        in_ring = place < jnp.minimum(rows(self.ring_length), self.ring)[:, None]
        in_global = (place >= self.ring) & (place < self.ring + rows(self.length)[:, None])
        table = lax.dynamic_slice_in_dim(rows(self.page_table), column * self.bc, self.bc, 1)

        def side(start):
            """Gather only keys or values. Slicing them out of gathered pages would be another pass over memory."""
            size = (1, self.page, self.h)
            pages = jax.vmap(lambda p: lax.dynamic_slice(self.pool, (p, 0, start), size))(table.reshape(-1))
            pages = pages.reshape(self.br, self.bs, self.h)
            return as_floats(pages, q.dtype) if self.scale is None else pages.astype(q.dtype)

        def biased(logits):
            if self.bias is None:
                return logits
            bias = gather_pages(self.bias, table).reshape(self.br, self.bs)
            return logits + jnp.where(in_global, bias, 0)[:, None]

        seen = in_ring | in_global
        logits, values = softmax.logits(rows(q), side(0)), side(self.h)
        if self.scale is not None:
            key_scale, value_scale = scales(gather_pages(self.scale, table).reshape(self.br, self.bs))
            logits, values = logits * key_scale[:, None], values * value_scale[..., None]
        logits = jnp.where(seen[:, None], biased(logits), softmax.MASKED)
        values = jnp.where(seen[..., None], values, 0)
        m, l, o = map(rows, state)
        tile = softmax.update((m, l, o), logits, values)
        return jax.tree.map(
            lambda a, x: lax.dynamic_update_slice_in_dim(a, x, group * self.br, 0), state, tile
        )

    def attend(self, q, state):
        """Return the softmax state of queries `[r queries h]` after all stored entries."""
        q, state = q[self.order], tuple(a[self.order] for a in state)
        state = lax.fori_loop(0, self.ends[-1], lambda x, state: self._tile(x, q, state), state)
        back = jnp.argsort(self.order)
        return tuple(a[back] for a in state)
