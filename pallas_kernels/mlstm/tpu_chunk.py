"""What the TPU kernels of `mlstm` know of a chunk of one (sequence, kv head).

Time runs along the lanes of what is narrow: gates, values, what is read. So values stand as `[e t]`, weights as `[key
query]`, and the memory as `[x d]`: its c, and after it z in whole sublanes, since the values have a row of ones there.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mlstm.xla import EPSILON

CHUNK = 128
"""Tokens of a chunk: the lanes, and the width of v5e's matrix units."""
SUBLANES = 8


class Inputs(NamedTuple):
    """Of `r` rows, each a (sequence, kv head), of `n` chunks, `t` tokens in all. They are whole blocks, `d` whole lanes
    and `e` whole sublanes."""

    q: jax.Array
    """`[r t d]`"""
    k: jax.Array
    """`[r t d]`"""
    v: jax.Array
    """`[r e t]`"""
    gates: jax.Array
    """`[r 3 t]`: the decays from a chunk's beginning to each token; log_i less them; the largest of that so far."""
    last: jax.Array
    """`[r 2 n]`: of each chunk's last token the first and the last of the gates."""
    m: jax.Array
    """`[r 1 1]`: before the first token."""
    memory: jax.Array
    """`[r x d]`"""


class Form(NamedTuple):
    """What the kernels are made for."""

    normaliser: str
    """The op's."""
    scale: float
    """Of what is read, 1/√d of the keys as they were given; with the plain normaliser 1."""
    block: int
    """Tokens that are on chip together: whole chunks."""
    interpret: Any
    """As `pallas_call` takes it; None: where there is no TPU."""

    @property
    def chunks(self) -> int:
        """Of a block."""
        return self.block // CHUNK


class Gates(NamedTuple):
    """Of one chunk. Weights are over `exp(top)`, as in XLA's form."""

    decay: jax.Array
    """`[1 C]`"""
    top: jax.Array
    """`[1 C]`"""
    before: jax.Array
    """`[1 C]`: the weight of the memory."""
    w: jax.Array
    """`[C C]`: that of each key for each query."""
    last: jax.Array
    """`[1 C]`: of each key for the last query."""
    kept: jax.Array
    """`[1 d]`: of the memory for the last query."""


def gates_of(gates: jax.Array, highest: jax.Array, m: jax.Array, d: int) -> Gates:
    """Of a chunk's `[3 C]`; `highest` is the last of its last row, a scalar as `m` is."""
    decay, written, top = (gates[i : i + 1] for i in range(3))
    top, end = (jnp.where(x > -jnp.inf, x, 0.0) for x in (jnp.maximum(m, top), jnp.maximum(m, highest)))
    key, query = (lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    of_key = jnp.broadcast_to(written, (CHUNK, CHUNK)).T
    w = jnp.where(key <= query, jnp.exp(of_key - top), 0.0)
    kept = jnp.exp(jnp.full((1, d), m - end))
    return Gates(decay, top, jnp.exp(m - top), w, jnp.exp(written - end), kept)


def below_values(x: jax.Array, row: jax.Array | float) -> jax.Array:
    """`[e C]` -> `[x C]`: with one more row, and zeros up to whole sublanes."""
    shape = SUBLANES, x.shape[1]
    first = lax.broadcasted_iota(jnp.int32, shape, 0) == 0
    return jnp.concatenate([x, jnp.where(first, jnp.broadcast_to(row, shape), 0.0)])


def divisor(form: Form, below: jax.Array, gates: Gates) -> jax.Array:
    """What is read of the values is divided by this, if by xlstm's normaliser after its scale."""
    if form.normaliser == "plain":
        return below + EPSILON
    return jnp.maximum(jnp.abs(below) * form.scale, floor(gates)) + EPSILON


def floor(gates: Gates) -> jax.Array:
    """What is 1 without a stabiliser."""
    return jnp.exp(-jnp.maximum(gates.decay + gates.top, -80.0))  # beyond that the quotient is 0


def dot(x: jax.Array, y: jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """A product exact to float32."""
    dims = ((contract[0],), (contract[1],)), ((), ())
    return lax.dot_general(x, y, dims, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


class Specs:
    """Where arrays of `n` chunks lie, in a grid of rows and blocks; `backwards` begins with the last block."""

    def __init__(self, form: Form, n: int, backwards: bool = False):
        self.chunks, self.block = form.chunks, form.block
        blocks = n // form.chunks
        self.grid = blocks
        self._at = (lambda i: blocks - 1 - i) if backwards else (lambda i: i)

    def tokens(self, d: int) -> pl.BlockSpec:
        """`[r t d]`"""
        return pl.BlockSpec((1, self.block, d), lambda r, i: (r, self._at(i), 0))

    def lanes(self, rows: int) -> pl.BlockSpec:
        """`[r rows t]`"""
        return pl.BlockSpec((1, rows, self.block), lambda r, i: (r, 0, self._at(i)))

    def memories(self, x: int, d: int) -> pl.BlockSpec:
        """`[r n x d]`"""
        return pl.BlockSpec((1, self.chunks, x, d), lambda r, i: (r, self._at(i), 0, 0))

    def row(self, *shape: int, scalars: bool = False) -> pl.BlockSpec:
        """`[r …]`, for all of the row's blocks."""
        space = pltpu.SMEM if scalars else pltpu.VMEM
        return pl.BlockSpec((1, *shape), lambda r, i: (r, 0, 0), memory_space=space)
