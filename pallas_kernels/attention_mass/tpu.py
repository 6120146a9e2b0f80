"""`attention_mass` on TPU: a tile of resident rows stays in lanes while the streamed rows pass in sublanes.

The reduction over streamed rows is therefore elementwise: every sublane keeps its own maximum and sum, to base 2, and
the eight are merged when a tile is done.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention_mass.passes import FLOOR, Span, apply, mass
from pallas_kernels.blocks import divisor
from pallas_kernels.interpret import tpu_interpret
from pallas_kernels.softmax import LOG2E, MASKED
from pallas_kernels.supported import require_attention
from pallas_kernels.varying import output
from pallas_kernels.vmem import query_bytes, vmem_limit

LANES, SUBLANES = 128, 8

CHUNK = 512
"""Most resident rows, and most streamed rows, of one product."""
BYTES = 1 << 11
"""Most bytes of a streamed row, of all heads, in a tile of four chunks: two such tiles are 8 MiB."""
ROWS = 32
"""Streamed rows that enter the online maximum together. They are few, so that their logits stay in registers while the
product of the next rows runs."""


def tpu(q, k, valid, lse, query_factor, key_factor, over, group, offset, interpret=None):
    require_attention("attention_mass", "tpu", q)
    call = functools.partial(log_mass, interpret=tpu_interpret(interpret))
    return mass(call, q, k, valid, lse, query_factor, key_factor, over, group, offset)


def tile_sizes(resident: int, streamed: int, streamed_bytes: int) -> tuple[int, int]:
    """Return the resident and streamed rows of a tile.

    If there are few rows of one kind, the time goes to reading the others, so a tile takes more of these, unless a
    streamed row (of all heads) has too many bytes.
    """
    br = _up(min(resident, 2 * CHUNK if streamed > LANES else 4 * CHUNK), LANES)
    br = _up(br, min(br, CHUNK))
    bu = CHUNK if resident > 2 * LANES or streamed_bytes > BYTES else 4 * CHUNK
    return br, bu if streamed > bu else _up(streamed, ROWS)


def _up(x: int, multiple: int) -> int:
    return pl.cdiv(x, multiple) * multiple


def log_mass(resident, streamed, column, span, maximum, *, interpret):
    b, size, h = resident.shape
    x = streamed.shape[1]
    br, bu = tile_sizes(size, span.rows, x * query_bytes(h, resident.dtype.itemsize))
    pack = divisor(x, CHUNK // bu)

    def streamed_tile(i, j):
        """Return the tile of step `j`. After the last tile that counts it does not change, so no more is fetched."""
        start, _, _, stop = _tiles(span, size, br, bu, i)
        return jnp.maximum(jnp.minimum(start + j, stop - 1), 0)

    values = column_spec = transposed = None
    if column is not None:
        # The kernel transposes the column into sublanes, so it has whole lanes.
        lanes = _up(bu, LANES)
        pad = _up(span.rows, lanes) - span.rows
        values = column.value * (1 if column.choose else LOG2E)
        values = jnp.pad(values, ((0, 0), (0, 0), (0, pad)))[:, :, None]
        column_spec = pl.BlockSpec((1, x, 1, lanes), lambda b, i, j: (b, 0, 0, streamed_tile(i, j)))
        transposed = pltpu.VMEM((pack, bu, LANES), jnp.float32)
    state = pltpu.VMEM((x, SUBLANES, br), jnp.float32)
    with_column = None if column is None else functools.partial(apply, column.choose)
    return pl.pallas_call(
        functools.partial(_kernel, with_column=with_column, span=span, size=size, maximum=maximum, pack=pack),
        grid=(b, pl.cdiv(size, br), pl.cdiv(span.rows, bu)),
        in_specs=[
            pl.BlockSpec((1, br, h), lambda b, i, j: (b, i, 0)),
            pl.BlockSpec((1, x, bu, h), lambda b, i, j: (b, 0, streamed_tile(i, j), 0)),
            column_spec,
        ],
        out_specs=pl.BlockSpec((1, x, br), lambda b, i, j: (b, 0, i)),
        out_shape=output((b, x, size), jnp.float32, resident),
        scratch_shapes=[state, None if maximum else state, transposed],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem_limit("attention_mass", x, h, resident.dtype.itemsize),
        ),
        name="attention_mass",
        interpret=interpret,
    )(resident, streamed, values)


def _tiles(span: Span, size: int, br: int, bu: int, i):
    """Return the bounds of the streamed tiles that resident tile `i` counts (`Span.tiles`)."""
    return span.tiles(i * br, jnp.minimum((i + 1) * br, size) - 1, bu)


def _kernel(
    r_ref, u_ref, column_ref, out_ref, m_ref, l_ref, transposed_ref, *, with_column, span, size, maximum, pack
):
    """`r_ref` [1 br h], `u_ref` [1 x bu h], `column_ref` [1 x 1 lanes] if there is a column, `out_ref` [1 x br]; then
    scratch: the running maxima and, unless only they are needed, sums [x 8 br]; the transposed column [pack bu 128]."""
    heads, bu, h = u_ref.shape[1:]
    br = r_ref.shape[1]
    bc = min(br, CHUNK)
    i, j = pl.program_id(1), pl.program_id(2)
    start, whole_start, whole_stop, stop = _tiles(span, size, br, bu, i)
    tile = start + j
    precision = lax.Precision.HIGHEST if r_ref.dtype == jnp.float32 else None

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full_like(m_ref, FLOOR)
        if l_ref is not None:
            l_ref[...] = jnp.zeros_like(l_ref)

    def logits(x, c, whole):
        """Return the logits [pack bu bc] of `pack` heads and chunk `c` of the resident rows."""
        u = u_ref[0, pl.ds(x, pack)].reshape(pack * bu, h)
        r = r_ref[0, pl.ds(pl.multiple_of(c * bc, bc), bc)]
        dims = (((1,), (1,)), ((), ()))
        z = lax.dot_general(u, r, dims, precision=precision, preferred_element_type=jnp.float32)
        z = (z * (LOG2E * h**-0.5)).reshape(pack, bu, bc)
        if transposed_ref is not None:
            z = with_column(z, jnp.tile(transposed_ref[...], (1, 1, bc // LANES)))
        if not whole:
            row = i * br + c * bc + lax.broadcasted_iota(jnp.int32, (1, bc), 1)
            place = tile * bu + lax.broadcasted_iota(jnp.int32, (bu, 1), 0)
            z = jnp.where((place >= span.low(row)) & (place < span.high(row)), z, MASKED)
        return z

    def add(x, c, whole):
        columns = pl.ds(pl.multiple_of(c * bc, bc), bc)
        z = logits(x, c, whole).reshape(pack, bu // ROWS, ROWS // SUBLANES, SUBLANES, bc)
        for y in range(pack):
            m = m_ref[x + y, :, columns]
            l = 0 if maximum else l_ref[x + y, :, columns]
            for part in range(bu // ROWS):
                m_new = jnp.maximum(m, z[y, part].max(0))
                if not maximum:
                    l = l * jnp.exp2(m - m_new) + jnp.exp2(z[y, part] - m_new).sum(0)
                m = m_new
            m_ref[x + y, :, columns] = m
            if not maximum:
                l_ref[x + y, :, columns] = l

    def all_heads(whole):
        def packed_heads(n, _):
            x = n * pack
            if transposed_ref is not None:
                for y in range(pack):
                    values = jnp.broadcast_to(column_ref[0, x + y], (LANES, column_ref.shape[3]))
                    transposed_ref[y] = values.T[:bu]
            lax.fori_loop(0, br // bc, lambda c, _: add(x, c, whole), None)

        lax.fori_loop(0, heads // pack, packed_heads, None)

    whole = (tile >= whole_start) & (tile < whole_stop)
    pl.when((tile < stop) & whole)(functools.partial(all_heads, True))
    pl.when((tile < stop) & ~whole)(functools.partial(all_heads, False))

    @pl.when(j == pl.num_programs(2) - 1)
    def _():
        m = m_ref[...].max(1)
        log = m
        if l_ref is not None:
            l = (l_ref[...] * jnp.exp2(m_ref[...] - m[:, None])).sum(1)
            log += jnp.log2(jnp.where(l > 0, l, 1))
        out_ref[0] = jnp.where(m > FLOOR, log / LOG2E, -jnp.inf)
