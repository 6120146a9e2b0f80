"""`attention_mass` on GPU, in Triton: a program holds a tile of resident rows and walks the streamed ones.

If that gives too few programs to fill the device, as for the log-sum-exp of few queries over many keys, the streamed
rows are split among several programs, whose results are joined afterwards.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.attention_mass.passes import FLOOR, apply, mass
from pallas_kernels.interpret import gpu_interpret
from pallas_kernels.softmax import LOG2E, MASKED
from pallas_kernels.supported import require_attention
from pallas_kernels.varying import output

PROGRAMS = 512
"""Programs that fill a device: four for each of some 130 multiprocessors."""


def gpu(q, k, valid, lse, query_factor, key_factor, over, group, offset, interpret=None):
    require_attention("attention_mass", "gpu", q)
    call = functools.partial(log_mass, interpret=gpu_interpret(interpret))
    return mass(call, q, k, valid, lse, query_factor, key_factor, over, group, offset)


def tile_sizes(resident: int, streamed: int, head_dim: int, itemsize: int) -> tuple[int, int]:
    """Return the resident and streamed rows of a tile: as many as registers hold, and at least the 16 of a tensor core.

    Exact float32 products do not use tensor cores and keep their operands in registers, too.
    """
    br, bu = (16, 16) if itemsize == 4 else (128, 64) if head_dim <= 128 else (64, 32)
    return max(16, min(pl.next_power_of_2(resident), br)), max(16, min(pl.next_power_of_2(streamed), bu))


def log_mass(resident, streamed, column, span, maximum, *, interpret):
    b, size, h = resident.shape
    x = streamed.shape[1]
    br, bu = tile_sizes(size, span.rows, h, resident.dtype.itemsize)
    tiles = pl.cdiv(size, br)
    splits = max(1, min(PROGRAMS // (b * tiles), span.rows // (8 * bu)))
    values, with_column = None, None
    if column is not None:
        values = column.value * (1 if column.choose else LOG2E)
        with_column = functools.partial(apply, column.choose)
    log = pl.pallas_call(
        functools.partial(
            _kernel, with_column=with_column, span=span, maximum=maximum, br=br, bu=bu, splits=splits
        ),
        grid=(tiles, splits, b),
        out_shape=output((b, splits, x, size), jnp.float32, resident),
        compiler_params=plt.CompilerParams(num_warps=8 if br == 128 else 4, num_stages=3),
        name="attention_mass",
        interpret=interpret,
    )(resident, streamed, values)
    return log.max(1) if maximum or splits == 1 else jax.nn.logsumexp(log, 1)


def _kernel(r_ref, u_ref, column_ref, out_ref, *, with_column, span, maximum, br, bu, splits):
    """`r_ref` [b size h], `u_ref` [b x rows h], `column_ref` [b x rows] if any, `out_ref` [b splits x size]."""
    _, size, h = r_ref.shape
    i, split, b = (pl.program_id(a) for a in range(3))
    dim = jnp.arange(pl.next_power_of_2(h))[None]
    row = i * br + jnp.arange(br)
    mask = (row < size)[:, None] & (dim < h)
    resident = plt.load(r_ref.at[b, row[:, None], dim], mask=mask, other=0)
    precision = lax.Precision.HIGHEST if resident.dtype == jnp.float32 else None

    start, whole_start, whole_stop, stop = span.tiles(i * br, jnp.minimum((i + 1) * br, size) - 1, bu)
    tiles_per_split = (jnp.maximum(stop - start, 0) + splits - 1) // splits
    first = start + split * tiles_per_split
    last = jnp.minimum(first + tiles_per_split, stop)
    whole_first, whole_last = jnp.clip(whole_start, first, last), jnp.clip(whole_stop, first, last)

    def add(x, whole, j, state):
        place = j * bu + jnp.arange(bu)
        inside = place < span.rows
        mask = (dim < h) if whole else inside[:, None] & (dim < h)
        u = plt.load(u_ref.at[b, x, place[:, None], dim], mask=mask, other=0)
        z = plt.dot(resident, u, trans_b=True, precision=precision) * (LOG2E * h**-0.5)
        if column_ref is not None:
            z = with_column(z, plt.load(column_ref.at[b, x, place], mask=inside, other=0))
        if not whole:
            low, high = span.low(row)[:, None], span.high(row)[:, None]
            z = jnp.where((place >= low) & (place < high), z, MASKED)
        m, l = state
        m_new = jnp.maximum(m, z.max(1))
        if maximum:
            return m_new, l
        return m_new, l * jnp.exp2(m - m_new) + jnp.exp2(z - m_new[:, None]).sum(1)

    def head(x, _):
        state = jnp.full(br, FLOOR, jnp.float32), jnp.zeros(br, jnp.float32)
        for whole, begin, end in (
            (False, first, whole_first),
            (True, whole_first, whole_last),
            (False, whole_last, last),
        ):
            state = lax.fori_loop(begin, end, functools.partial(add, x, whole), state)
        m, l = state
        log = m if maximum else m + jnp.log2(jnp.where(l > 0, l, 1))
        log = jnp.where(m > FLOOR, log / LOG2E, -jnp.inf)
        plt.store(out_ref.at[b, split, x, row], log, mask=row < size)

    lax.fori_loop(0, u_ref.shape[1], head, None)
