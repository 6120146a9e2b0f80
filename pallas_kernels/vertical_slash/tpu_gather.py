"""The far list on a TPU: of a list of keys those that some query sees, in order.

XLA's gather moves one row at a time. Here all keys are read in order, and a product with a matrix of zeros and ones,
which is exact, puts the seen ones of each 128 after those before them, into a buffer of two blocks. From there whole
blocks go to memory, and last what is left.
"""

import functools
import operator

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.interpret import tpu_interpret
from pallas_kernels.varying import output
from pallas_kernels.vertical_slash.key_lists import FOREVER, Keys, padded
from pallas_kernels.vertical_slash.tpu_walk import LANES, dot

ROWS = 16
"""Rows of a tile of memory in bfloat16, in float32 two."""
BYTES = range(0, 32, 8)
"""A mark as the shifts of its four bytes: each is exact in bfloat16."""


def seen(keys: Keys, *, block: int, interpret=None) -> Keys:
    """The entries that some query sees, then such that nobody does. Nothing is written after the `block` of entries in
    which the last seen one stands; walks in tiles of `block` read nothing there."""
    keys = padded(keys, block)
    r, s, h = keys.k.shape
    n, chunks = s // block, block // LANES
    chosen = (keys.start < keys.stop).reshape(r, -1, LANES)
    rank = jnp.where(chosen, jnp.cumsum(chosen, -1, dtype=jnp.int32) - 1, -LANES)
    # of each row how many are before each chunk, and in all; flat, since scalar memory pads every row: it has room for
    # 33 million keys
    before = jnp.pad(jnp.cumsum(jnp.sum(chosen, -1, dtype=jnp.int32), -1), ((0, 0), (1, 0)))
    marks = [keys.start, keys.stop]
    if keys.log_gate is not None:
        marks.append(lax.bitcast_convert_type(keys.log_gate, jnp.int32))

    def source(r, j, before):
        return r, jnp.minimum(j, n - 1)

    def target(r, j, before):
        return r, before[r * (n * chunks + 1) + j * chunks] // block

    def rows(place):
        return pl.BlockSpec((None, block, h), lambda *at: (*place(*at), 0))

    def lines(place, count):
        return pl.BlockSpec((None, count, block), lambda *at: (place(*at)[0], 0, place(*at)[1]))

    k, v, found = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(r, n + 1),
            in_specs=[rows(source), rows(source), lines(source, len(marks)), lines(source, 1)],
            out_specs=[rows(target), rows(target), lines(target, len(marks))],
            scratch_shapes=[
                pltpu.VMEM((2 * block + ROWS, h), keys.k.dtype),
                pltpu.VMEM((2 * block + ROWS, h), keys.v.dtype),
                pltpu.VMEM((len(marks), 2 * block), jnp.int32),
            ],
        ),
        out_shape=[
            output((r, s + block, h), keys.k.dtype, keys.k),
            output((r, s + block, h), keys.v.dtype, keys.k),
            output((r, len(marks), s + block), jnp.int32, keys.k),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name="far_list",
        interpret=tpu_interpret(interpret),
    )(before.reshape(-1), keys.k, keys.v, jnp.stack(marks, 1), rank.reshape(r, 1, s))
    written = jnp.arange(s + block) < before[:, -1:]
    start, stop, *gate = (jnp.where(written, found[:, at], 0) for at in range(len(marks)))
    gate = lax.bitcast_convert_type(gate[0], jnp.float32) if gate else None
    return Keys(k, v, jnp.where(written, start, FOREVER), stop, gate)


def _kernel(
    before, k_ref, v_ref, marks_ref, rank_ref, k_out, v_out, marks_out, k_staged, v_staged, marks_staged
):
    row, j = pl.program_id(0), pl.program_id(1)
    n = pl.num_programs(1) - 1
    block, count = k_ref.shape[0], marks_ref.shape[0]
    chunks = block // LANES

    def filled(chunk):
        return before[row * (n * chunks + 1) + chunk]

    # where the staged entries begin in the row's list
    first = filled(j * chunks) // block * block

    @pl.when(j == 0)
    def _():
        for staged in (k_staged, v_staged, marks_staged):
            staged[...] = jnp.zeros_like(staged)

    @pl.when(j < n)
    def _():
        for c in range(chunks):
            chunk = slice(c * LANES, (c + 1) * LANES)
            at, rank = filled(j * chunks + c) - first, rank_ref[:, chunk]
            begin, moved = _places(at, rank, ROWS)
            for x, staged in ((k_ref, k_staged), (v_ref, v_staged)):
                rows = dot(moved.astype(x.dtype), x[chunk]).astype(x.dtype)
                staged[pl.ds(begin, ROWS)] += rows[:ROWS]
                staged[pl.ds(begin + ROWS, LANES)] = rows[ROWS:]
            begin, moved = _places(at, rank, LANES)
            pieces = jnp.concatenate([marks_ref[:, chunk] >> shift & 255 for shift in BYTES])
            pieces = dot(pieces.astype(jnp.bfloat16), moved.astype(jnp.bfloat16), (1, 1)).astype(jnp.int32)
            parts = (pieces[i * count : (i + 1) * count] << shift for i, shift in enumerate(BYTES))
            marks = functools.reduce(operator.or_, parts)
            marks_staged[:, pl.ds(begin, LANES)] += marks[:, :LANES]
            marks_staged[:, pl.ds(begin + LANES, LANES)] = marks[:, LANES:]

    full = filled(jnp.minimum(j + 1, n) * chunks) - first >= block

    @pl.when(full | (j == n))
    def _():
        for staged, out in ((k_staged, k_out), (v_staged, v_out)):
            out[...] = staged[:block]
            staged[:block] = staged[block : 2 * block]
            staged[block : 2 * block] = jnp.zeros_like(out)
        marks_out[...] = marks_staged[:, :block]
        marks_staged[:, :block] = marks_staged[:, block:]


def _places(at, rank, align):
    """Where a chunk's entries go: from a multiple of `align` on; and which of them goes to which place there. What
    stands before `at` stays, by adding zero; what stands after the entries becomes zero."""
    place = lax.broadcasted_iota(jnp.int32, (align + LANES, LANES), 0)
    return pl.multiple_of(at // align * align, align), place == rank + at % align
