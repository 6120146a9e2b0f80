"""The far list on a TPU: the keys of a list that some query sees, in order.

XLA's gather moves one row at a time. Here all keys are read in order. For every 128 keys, a product with a matrix of
zeros and ones, which is exact, appends the seen keys to a buffer of two blocks. Whole blocks are written from there to
memory, and the rest at the end.

A list is allocated for all keys, however few are seen. To save memory, lists are made and walked a few rows at a time.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.blocks import divisor
from pallas_kernels.choose import target
from pallas_kernels.interpret import tpu_interpret
from pallas_kernels.softmax import dot
from pallas_kernels.varying import alike, output
from pallas_kernels.vertical_slash.key_lists import FOREVER, Keys, band_and_far, pad, pad_marks
from pallas_kernels.vertical_slash.tpu_walk import LANES, wide

ROWS = 16
"""Rows of a memory tile in bfloat16, or of two tiles in float32."""
BYTES = range(0, 32, 8)
"""The shifts of a mark's four bytes. bfloat16 represents each byte exactly."""


SMALL = 64 << 20
"""Lists of up to this many bytes are always made at once."""


def rows_at_once(k: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Return the number of rows of `k` to process at once: at most a quarter of them or `SMALL` bytes, whichever is
    more.

    The chip's cores get equal numbers of rows. If this is impossible, all rows are processed at once.
    """
    r = k.shape[0]
    cores = pltpu.get_tpu_info().num_cores if target().platform == "tpu" else 1
    if r % cores:
        return r
    most = max(r // 4, SMALL * r // (2 * k.size * k.dtype.itemsize))
    return cores * divisor(r // cores, max(1, most // cores))


def in_parts(
    part: Callable[[Any, int, Any], Any], k: jax.Array, *like: jax.Array | jax.ShapeDtypeStruct
) -> Any:
    """Run `part(row, rows, out)` for all rows of `k`, a few at a time, and return the results.

    `part` fills in its rows of `out`, arrays like `like`. If all rows are processed at once, `out` is empty.
    """
    r, rows = k.shape[0], rows_at_once(k)
    if rows == r:
        return part(0, r, ())
    out, _ = alike([lax.empty(x.shape, x.dtype) for x in like], k)
    return lax.fori_loop(0, r // rows, lambda i, out: list(part(i * rows, rows, out)), out)


def lists(
    k: Shaped[Array, "r s h"],
    v: Shaped[Array, "r s h"],
    end: Int[Array, "r s"],
    log_gate: Float[Array, "r s"] | None,
    *,
    row: Any,
    rows: int,
    window: int,
    block: int,
    interpret: Any = None,
) -> tuple[Keys, Keys]:
    """Return the band of `rows` rows from `row` on, and a far list of only the keys that some query sees."""
    end, log_gate = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, row, rows), (end, log_gate))
    band, far = band_and_far(k, v, end, log_gate, window)
    return band, gather_seen(far, block=block, row=row, interpret=interpret)


def gather_seen(keys: Keys, *, block: int, row: Any = 0, interpret=None) -> Keys:
    """Return the entries that some query sees, followed by entries that no query sees.

    Nothing is written after the `block` of entries that contains the last seen one, since walks in tiles of `block` do
    not read further. Keys and values have all rows; `row` is the first row of the list.
    """
    if keys.k.shape[1] < block:
        keys = pad(keys, block)
    keys, h = pad_marks(keys, block), keys.k.shape[2]
    r, s = keys.start.shape
    n, chunks = s // block, block // LANES
    chosen = (keys.start < keys.stop).reshape(r, -1, LANES)
    # The sums are an exact product: with few long rows XLA takes a minute to compile `cumsum`.
    earlier = jnp.triu(jnp.ones((LANES, LANES), jnp.bfloat16), 1)
    rank = jnp.dot(chosen.astype(jnp.bfloat16), earlier, preferred_element_type=jnp.float32)
    rank = jnp.where(chosen, rank.astype(jnp.int32), -LANES)
    # The number of chosen entries before each chunk of a row, and in total. It is flat, since scalar memory pads every
    # row, and so has space for 33 million keys.
    before = jnp.pad(jnp.cumsum(jnp.sum(chosen, -1, dtype=jnp.int32), -1), ((0, 0), (1, 0)))
    marks = [keys.start, keys.stop]
    if keys.log_gate is not None:
        marks.append(lax.bitcast_convert_type(keys.log_gate, jnp.int32))

    def source(r, j, *_):
        return r, jnp.minimum(j, n - 1)

    def all_rows(r, j, before, row):
        return row[0] + r, jnp.minimum(j, n - 1)

    def place(r, j, before, *_):
        return r, before[r * (n * chunks + 1) + j * chunks] // block

    def rows(place):
        return pl.BlockSpec((None, block, h), lambda *at: (*place(*at), 0))

    def lines(place, count):
        return pl.BlockSpec((None, count, block), lambda *at: (place(*at)[0], 0, place(*at)[1]))

    # Keep it out of vector memory, where reading it would take vector instructions that compete with the attention.
    list_in_hbm = pltpu.HBM.from_type(jax.typeof(keys.k).update(shape=(r, s + block, h)))
    k, v, listed_marks = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(r, n + 1),
            in_specs=[rows(all_rows), rows(all_rows), lines(source, len(marks)), lines(source, 1)],
            out_specs=[rows(place), rows(place), lines(place, len(marks))],
            scratch_shapes=[
                pltpu.VMEM((2 * block + ROWS, h), keys.k.dtype),
                pltpu.VMEM((2 * block + ROWS, h), keys.v.dtype),
                pltpu.VMEM((len(marks), 2 * block), jnp.int32),
            ],
        ),
        out_shape=[
            list_in_hbm,
            list_in_hbm,
            output((r, len(marks), s + block), jnp.int32, keys.k),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name="far_list",
        interpret=tpu_interpret(interpret),
    )(
        before.reshape(-1),
        jnp.full(1, row, jnp.int32),
        keys.k,
        keys.v,
        jnp.stack(marks, 1),
        rank.reshape(r, 1, s),
    )
    written = jnp.arange(s + block) < before[:, -1:]
    start, stop, *gate = (jnp.where(written, listed_marks[:, at], 0) for at in range(len(marks)))
    gate = lax.bitcast_convert_type(gate[0], jnp.float32) if gate else None
    return Keys(k, v, jnp.where(written, start, FOREVER), stop, gate)


def _kernel(
    before, _, k_ref, v_ref, marks_ref, rank_ref, k_out, v_out, marks_out, k_staged, v_staged, marks_staged
):
    row, j = pl.program_id(0), pl.program_id(1)
    n = pl.num_programs(1) - 1
    block, count = k_ref.shape[0], marks_ref.shape[0]
    chunks = block // LANES

    def filled(chunk):
        return before[row * (n * chunks + 1) + chunk]

    # the index in the row's list at which the staged entries begin
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
            # Entries that are not chosen become zero. They may be padding, even NaN, or beyond the keys.
            chosen = wide(jnp.broadcast_to(rank, (LANES, LANES)).T, k_ref.shape[1]) >= 0
            for x, staged in ((k_ref, k_staged), (v_ref, v_staged)):
                entries = jnp.where(chosen, x[chunk].astype(jnp.float32), 0).astype(x.dtype)
                rows = dot(moved.astype(x.dtype), entries).astype(x.dtype)
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
    """Return where to write a chunk, a multiple of `align`, and the matrix of zeros and ones that moves its entries.

    Entries before `at` do not change, since zero is added. Entries after the chunk become zero.
    """
    place = lax.broadcasted_iota(jnp.int32, (align + LANES, LANES), 0)
    return pl.multiple_of(at // align * align, align), place == rank + at % align
