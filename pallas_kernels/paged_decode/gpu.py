"""`paged_decode` on GPUs, in Triton. Every program takes an equal share of all rows' tiles (`stream_k.py`).

A row's entries are those of the ring followed by the global ones, cut into tiles of keys. Biases and scales are read in
place, at the page indices of the keys.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.int8_entries import scales
from pallas_kernels.interpret import gpu_interpret
from pallas_kernels.paged_decode.chunked import TOKENS, attend_many
from pallas_kernels.paged_decode.stream_k import (
    Shares,
    merge,
    multiprocessors,
    row_table,
    share,
)
from pallas_kernels.paged_decode.supported import check_supported
from pallas_kernels.softmax import LOG2E, MASKED
from pallas_kernels.supported import overflows
from pallas_kernels.varying import output
from pallas_kernels.vertical_slash import hopper
from pallas_kernels.vertical_slash.gpu import attend

TILE_BYTES = 1 << 15
"""Bytes of a tile's keys and values."""
STAGES = 5
"""Pipeline stages of the loop over tiles. Two tiles are in flight, and the page indices of a third: the compiler gives
each of the two kinds of loads half of the stages."""
PROGRAMS = 2
"""Programs per multiprocessor."""
LARGEST = 1 << 14
"""The most queries of a row × head_dim, each rounded up to a power of two: 64 registers per thread. More queries are
tiled like those of many tokens (`attend_many`)."""


class _Sizes(NamedTuple):
    """The compile-time constants of the kernel. `r2` and `queries2` are rounded up to powers of two."""

    shares: Shares
    r2: int
    queries2: int
    page: int
    keys: int
    ring_pages: int
    precision: lax.Precision | None


def _dot(a, b, dimensions, sizes: _Sizes):
    return lax.dot_general(
        a, b, (dimensions, ((), ())), precision=sizes.precision, preferred_element_type=jnp.float32
    )


def _attend(rows_ref, q_ref, pool_ref, table_ref, bias_ref, scale_ref, o_ref, lse_ref, *, sizes: _Sizes):
    program, shares = pl.program_id(0), sizes.shares
    begin, stop = share(program, rows_ref[0, shares.r], shares)
    query, column = jnp.arange(sizes.queries2), jnp.arange(shares.h2)
    query_exists, column_exists = (query < shares.queries)[:, None], (column < shares.h)[None]

    def attend(row, _):
        start, end = rows_ref[0, row], rows_ref[0, row + 1]
        ring, entries = rows_ref[1, row], rows_ref[1, row] + rows_ref[2, row]
        q = plt.load(q_ref.at[row, query[:, None], column[None]], mask=query_exists & column_exists, other=0)

        def tile(index, state):
            m, l, o = state
            position = index * sizes.keys + jnp.arange(sizes.keys)
            stored = position < entries
            in_ring = position < ring
            position = jnp.where(in_ring, position, position - ring)
            column_of_table = position // sizes.page + jnp.where(in_ring, 0, sizes.ring_pages)
            page = plt.load(table_ref.at[row, column_of_table], mask=stored, other=0)
            page = jnp.clip(page, 0, pool_ref.shape[0] - 1)
            pages = page[:, None]

            def side(first):
                entries = pool_ref.at[pages, (position % sizes.page)[:, None], first + column[None]]
                return plt.load(entries, mask=stored[:, None] & column_exists, other=0).astype(q.dtype)

            x = _dot(q, side(0), ((1,), (1,)), sizes) * shares.scale
            value_scale = None
            if scale_ref is not None:
                packed = plt.load(scale_ref.at[page, position % sizes.page], mask=stored, other=0)
                key_scale, value_scale = scales(packed)
                x *= key_scale[None]
            if bias_ref is not None:
                biased = stored & jnp.logical_not(in_ring)
                x += plt.load(bias_ref.at[page, position % sizes.page], mask=biased, other=0)[None] * LOG2E
            x = jnp.where(stored[None], x, MASKED)
            m_new = jnp.maximum(m, x.max(1))
            p = jnp.exp2(x - m_new[:, None])
            kept = jnp.exp2(m - m_new)
            v = side(shares.h)
            weight = p if value_scale is None else p * value_scale[None]
            pv = _dot(weight.astype(v.dtype), v, ((1,), (0,)), sizes)
            return m_new, l * kept + p.sum(1), o * kept[:, None] + pv

        m = jnp.full(sizes.queries2, MASKED, jnp.float32)
        o = jnp.zeros((sizes.queries2, shares.h2), jnp.float32)
        first, last = jnp.maximum(begin, start) - start, jnp.minimum(stop, end) - start
        m, l, o = lax.fori_loop(first, last, tile, (m, jnp.zeros_like(m), o))
        l = jnp.where(l == 0, 1, l)  # Only for a row without tiles, whose slot is not read.
        slot = program + row
        plt.store(
            o_ref.at[slot, query[:, None], column[None]],
            o / l[:, None],
            mask=query_exists & column_exists,
        )
        plt.store(lse_ref.at[slot, query], m + jnp.log2(l), mask=query < shares.queries)

    @pl.when(begin < stop)
    def _():
        row = jnp.arange(sizes.r2)
        ends = plt.load(rows_ref.at[0, row + 1], mask=row < shares.r, other=stop)
        first, last = ((ends <= x).sum() for x in (begin, stop - 1))
        lax.fori_loop(first, last + 1, attend, None)


def gpu(
    q, pool, page_table, length, ring_length, ring_pages, new, bias, scale, dtype, append=None,
    interpret: bool | None = None,
):  # fmt: skip
    check_supported("gpu", q, pool, page_table)
    b, n, t, h = q.shape
    heads, columns = page_table.shape[1:]
    page = pool.shape[1]
    r, queries = b * heads, n // heads * t
    h2 = pl.next_power_of_2(h)
    if t > TOKENS or max(16, pl.next_power_of_2(queries)) * h2 > LARGEST or overflows(pool):
        name, kernel = ("hopper", hopper.attend) if hopper.takes(q) else ("gpu", attend)
        many = functools.partial(kernel, dtype=jnp.float32, interpret=interpret)
        stored = q, pool, page_table, length, ring_length, ring_pages, new, bias, scale
        return attend_many(many, name, *stored, dtype, append)
    # A large output gets more warps and smaller tiles: registers for it and shared memory for q are limited.
    large = 2 * max(16, pl.next_power_of_2(queries)) * h2 >= LARGEST
    keys = min(128, max(16, TILE_BYTES // (2 * h2 * pool.dtype.itemsize) // (2 if large else 1)))
    programs = min(PROGRAMS * multiprocessors(), r * -(-columns * page // keys))
    shares = Shares(r, queries, t, h, programs)
    sizes = _Sizes(
        shares,
        r2=pl.next_power_of_2(r),
        queries2=max(16, pl.next_power_of_2(queries)),
        page=page,
        keys=keys,
        ring_pages=ring_pages,
        precision=lax.Precision.HIGHEST if q.dtype == jnp.float32 else None,
    )
    rows = row_table(length, ring_length, lambda ring, length: pl.cdiv(ring + length, keys))
    q = q.reshape(r, queries, h)
    interpret = gpu_interpret(interpret)
    parts = pl.pallas_call(
        functools.partial(_attend, sizes=sizes),
        grid=(programs,),
        out_shape=[
            output((shares.slots, queries, h), jnp.float32, q),
            output((shares.slots, queries), jnp.float32, q),
        ],
        compiler_params=plt.CompilerParams(num_warps=8 if large else 4, num_stages=STAGES),
        interpret=interpret,
        name="paged_decode",
    )(rows, q, pool, page_table.reshape(r, columns), bias, scale)
    options = {"pool": pool, "append": append, "dtype": dtype, "interpret": interpret}
    o, lse, pool = merge(shares, rows, q, new, *parts, **options)
    return o.reshape(b, n, t, h), lse.reshape(b, n, t), pool
