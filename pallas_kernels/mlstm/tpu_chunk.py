"""Inputs, gates and block specs that the TPU kernels of `mlstm` share, for chunks of one (sequence, kv head).

Time runs along the lanes of narrow arrays: gates, values, outputs. So values are stored as `[e t]`, weights as `[key
query]`, and the memory as `[x d]`: first c, then z padded to whole sublanes, where the values have a row of ones.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mlstm.xla import EPSILON

CHUNK = 128
"""Tokens of a chunk: the number of lanes of a vector, and the width of v5e's matrix units."""
SUBLANES = 8


class Inputs(NamedTuple):
    """The kernel inputs: `r` rows, each a (sequence, kv head), of `n` chunks and `t` tokens.

    `t` is padded to whole blocks, `d` to whole lanes and `e` to whole sublanes.
    """

    q: jax.Array
    """`[r t d]`"""
    k: jax.Array
    """`[r t d]`"""
    v: jax.Array
    """`[r e t]`"""
    gates: jax.Array
    """`[r 3 t]`: the sum of log_f from the chunk's beginning to each token, log_i minus that, and its running
    maximum."""
    last: jax.Array
    """`[r 2 n]`: the first and the third of the gates at each chunk's last token."""
    m: jax.Array
    """`[r 1 1]`: the m before the first token."""
    memory: jax.Array
    """`[r x d]`"""


class Form(NamedTuple):
    """The compile-time settings of the kernels."""

    normaliser: str
    scale: float
    """The factor of the read values: 1/√d, where d is the keys' width before padding. 1 for the plain normaliser."""
    block: int
    """The number of tokens that are on chip together: whole chunks."""
    interpret: Any
    """The argument of `pallas_call`. None: interpret unless on a TPU."""

    @property
    def chunks(self) -> int:
        """The number of chunks of a block."""
        return self.block // CHUNK


class Gates(NamedTuple):
    """The gates of one chunk. Weights are divided by their query's `exp(decay + top)`, as in the XLA form."""

    decay: jax.Array
    """`[1 C]`"""
    top: jax.Array
    """`[1 C]`"""
    before: jax.Array
    """`[1 C]`: the weight of the memory for each query."""
    w: jax.Array
    """`[C C]`: the weight of each key for each query."""
    last: jax.Array
    """`[1 C]`: the weight of each key for the last query."""
    kept: jax.Array
    """`[1 d]`: the weight of the memory for the last query."""


def gates_of(gates: jax.Array, highest: jax.Array, m: jax.Array, d: int) -> Gates:
    """Return the gates of a chunk from its `[3 C]`. The scalar `highest` is the last number of its last row."""
    decay, written, top = (gates[i : i + 1] for i in range(3))
    top, end = (jnp.where(x > -jnp.inf, x, 0.0) for x in (jnp.maximum(m, top), jnp.maximum(m, highest)))
    key, query = (lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    of_key = jnp.broadcast_to(written, (CHUNK, CHUNK)).T
    w = jnp.where(key <= query, jnp.exp(of_key - top), 0.0)
    kept = jnp.exp(jnp.full((1, d), m - end))
    return Gates(decay, top, jnp.exp(m - top), w, jnp.exp(written - end), kept)


def below_values(x: jax.Array, row: jax.Array | float) -> jax.Array:
    """Append `row` and zeros up to whole sublanes: `[e C]` -> `[x C]`."""
    shape = SUBLANES, x.shape[1]
    first = lax.broadcasted_iota(jnp.int32, shape, 0) == 0
    return jnp.concatenate([x, jnp.where(first, jnp.broadcast_to(row, shape), 0.0)])


def divisor(form: Form, below: jax.Array, gates: Gates) -> jax.Array:
    """Return the denominator of the read values, which are scaled by `form.scale`."""
    if form.normaliser == "plain":
        return below + EPSILON
    return jnp.maximum(jnp.abs(below) * form.scale, floor(gates)) + EPSILON


def floor(gates: Gates) -> jax.Array:
    """Return the floor of xlstm's denominator: 1, divided by `exp(decay + top)` like the weights."""
    return jnp.exp(-jnp.maximum(gates.decay + gates.top, -80.0))  # beyond that the quotient is 0


def dot(x: jax.Array, y: jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """Multiply matrices in full float32 precision."""
    dims = ((contract[0],), (contract[1],)), ((), ())
    return lax.dot_general(x, y, dims, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


class Specs:
    """Block specs of arrays of `n` chunks in a grid of rows and blocks. `backwards` starts with the last block."""

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
        """`[r …]`: all of a row, for every block."""
        space = pltpu.SMEM if scalars else pltpu.VMEM
        return pl.BlockSpec((1, *shape), lambda r, i: (r, 0, 0), memory_space=space)
