"""Blocks of queries and tiles of keys for attention in XLA."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from pallas_kernels.choose import target


def even(length: int, largest: int) -> tuple[int, int]:
    """Return the number and the size of equal blocks of at most `largest` that cover `length` with little excess.

    `largest` must be a multiple of 16, the lanes of a CPU's vectors. The size is one, too, or is `length`.
    """
    count = -(-length // largest)
    size = min(length, -(-length // (16 * count)) * 16)
    return -(-length // size), size


def block_size(length: int) -> int:
    """Return the largest block for a sequence of `length`: a 32nd of it, within [64, 256].

    Large blocks lose less time between products and occupy more threads. Small blocks waste less work at the edges of
    the mask and stay in cache. Measured on two CPU cores at lengths from 256 to 16K.
    """
    return min(max(length // 32 // 16 * 16, 64), 256)


def divisor(length: int, largest: int) -> int:
    """Return the largest divisor of `length` that is at most `largest`, and at least 1."""
    return next(d for d in range(max(1, min(length, largest)), 0, -1) if length % d == 0)


def logits_at_once() -> int:
    """Return the target number of logits of a tile, which may hold several (sequence, kv head) rows.

    On a CPU a tile holds one row: jax 0.11 spreads a batch of small products over as many threads as there are virtual
    devices, at several times the cost.
    """
    return 1 if target().platform == "cpu" else 1 << 24


class Blocks:
    """Groups of `bb` sequences and `kk` kv heads; blocks of `bq` of the `t` queries; tiles of `bk` of the `s` keys.

    A block of queries is `[bb kk g·bq …]`: a kv head's query heads are stacked. Groups take sequences before heads,
    since a head keeps about as much of one sequence as of another. The queries are the last of the `s` indices. If
    blocks do not fit exactly, the last one is moved back and overlaps the one before.
    """

    def __init__(self, q, k):
        b, heads, self.g, self.t, _ = q.shape
        self.s = k.shape[2]
        self.blocks, self.bq = even(self.t, block_size(self.s))
        self.tiles, self.bk = even(self.s, block_size(self.s))
        rows = max(1, logits_at_once() // (self.g * self.bq * self.bk))
        self.bb = divisor(b, rows)
        self.kk = divisor(heads, rows // self.bb)
        self.columns = heads // self.kk
        self.groups = b // self.bb * self.columns
        # Tables: arithmetic on a loop counter would keep XLA from vectorising the comparisons that use it.
        first = jnp.arange(self.blocks)[:, None] * self.bq
        place = jnp.minimum(first, self.t - self.bq) + jnp.arange(self.bq)
        self.query_index = jnp.tile(place + self.s - self.t, self.g)
        """`[block g·bq]`: the index of every query."""
        self.query_owned = jnp.tile(place >= first, self.g)
        """`[block g·bq]`: False for queries that the block before contains, too."""
        first = jnp.arange(self.tiles)[:, None] * self.bk
        place = jnp.minimum(first, self.s - self.bk) + jnp.arange(self.bk)
        self.key_index = jnp.where(place >= first, place, self.s)
        """`[tile bk]`: the index of every key, or `s`, after every query, for keys of the tile before."""

    def _corner(self, group):
        return group // self.columns * self.bb, group % self.columns * self.kk

    def _query_corner(self, x, group, i):
        start = jnp.minimum(i * self.bq, self.t - self.bq)
        return *self._corner(group), 0, start, *(0 for _ in x.shape[4:])

    def queries(self, x: Shaped[Array, "b k g t ..."], group, i) -> Shaped[Array, "bb kk rows ..."]:
        sizes = (self.bb, self.kk, self.g, self.bq, *x.shape[4:])
        block = lax.dynamic_slice(x, self._query_corner(x, group, i), sizes)
        return block.reshape(self.bb, self.kk, self.g * self.bq, *x.shape[4:])

    def set_queries(self, x: Shaped[Array, "b k g t ..."], group, i, block):
        block = block.reshape(self.bb, self.kk, self.g, self.bq, *x.shape[4:]).astype(x.dtype)
        return lax.dynamic_update_slice(x, block, self._query_corner(x, group, i))

    def slice_keys(
        self, x: Shaped[Array, "b k s ..."], group, start, size
    ) -> Shaped[Array, "bb kk size ..."]:
        rest = x.shape[3:]
        return lax.dynamic_slice(
            x, (*self._corner(group), start, *(0 for _ in rest)), (self.bb, self.kk, size, *rest)
        )

    def keys(self, x: Shaped[Array, "b k s ..."], group, j) -> Shaped[Array, "bb kk bk ..."]:
        return self.slice_keys(x, group, jnp.minimum(j * self.bk, x.shape[2] - self.bk), self.bk)

    def add_keys(self, x: Shaped[Array, "b k s ..."], group, j, tile):
        start = jnp.minimum(j * self.bk, x.shape[2] - self.bk)
        return lax.dynamic_update_slice(
            x, self.keys(x, group, j) + tile, (*self._corner(group), start, *(0 for _ in x.shape[3:]))
        )

    def loop(self, step: Callable[[Any, Any, Any], Any], carry: Any) -> Any:
        """Run `step(group, i, carry)` over all groups and all blocks of queries; return the last carry."""

        def blocks(group, carry):
            return lax.fori_loop(0, self.blocks, lambda i, carry: step(group, i, carry), carry)

        return lax.fori_loop(0, self.groups, blocks, carry)
