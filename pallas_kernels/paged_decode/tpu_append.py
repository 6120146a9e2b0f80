"""The writing of a decoded token on TPU. Memory is written there by tiles of eight entries: the tiles of all rows are
fetched at once, changed, and put back."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.blocks import divisor
from pallas_kernels.interpret import tpu_interpret
from pallas_kernels.paged_decode.append import Append
from pallas_kernels.varying import output

TILE = 8
"""Entries that are copied together."""
ROWS = 64
"""Most rows of a step, whose tiles are in VMEM together."""
SLOT, MOVED = range(2)


def _kernel(places_ref, new_ref, lse_ref, pool_ref, out_ref, tiles, sem, *, rows: int):
    del lse_ref, pool_ref  # lse is an input so that attention comes first; the pool is the output
    first = pl.program_id(0) * rows
    pages, page, _ = out_ref.shape

    def place(row, which):
        """The index of a row's entry, and True if it lies in the pool."""
        index = places_ref[which, first + row]
        return index, index < pages * page

    def each_copy(act):
        """Run `act(fetch, put)` for every tile, with its copies from the pool and back."""

        def copies(row, _):
            for which in (SLOT, MOVED):
                index, there = place(row, which)
                begin = lax.rem(index, page) // TILE * TILE
                here = out_ref.at[lax.div(index, page), pl.ds(pl.multiple_of(begin, TILE), TILE)]
                tile = tiles.at[row, which]
                fetch, put = (pltpu.make_async_copy(*x, sem) for x in ((here, tile), (tile, here)))
                pl.when(there)(functools.partial(act, fetch, put))

        lax.fori_loop(0, rows, copies, None)

    def change(row, _):
        entry = lax.broadcasted_iota(jnp.int32, tiles.shape[2:], 0)
        (slot, _), (moved, _) = place(row, SLOT), place(row, MOVED)
        at = entry == lax.rem(slot, TILE)
        x = tiles[row, SLOT]
        old = jnp.where(at, x.astype(jnp.float32), 0).sum(0, keepdims=True).astype(x.dtype)
        tiles[row, MOVED] = jnp.where(entry == lax.rem(moved, TILE), old, tiles[row, MOVED])
        tiles[row, SLOT] = jnp.where(at, new_ref[row], x)

    each_copy(lambda fetch, put: fetch.start())
    each_copy(lambda fetch, put: fetch.wait())
    lax.fori_loop(0, rows, change, None)
    each_copy(lambda fetch, put: put.start())
    each_copy(lambda fetch, put: put.wait())


def written(pool, append: Append | None, new, lse, interpret: Any):
    """Return what `append.written` does; the pool is written in place."""
    if append is None:
        return pool
    r, kv = append.slot.size, pool.shape[2]
    rows = divisor(r, ROWS)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(_kernel, rows=rows),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(r // rows,),
            in_specs=[pl.BlockSpec((rows, 1, kv), lambda step, *_: (step, 0, 0)), anywhere, anywhere],
            out_specs=anywhere,
            scratch_shapes=[pltpu.VMEM((rows, 2, TILE, kv), pool.dtype), pltpu.SemaphoreType.DMA],
        ),
        out_shape=output(pool.shape, pool.dtype, pool),
        input_output_aliases={3: 0},
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        interpret=tpu_interpret(interpret),
        name="paged_decode_append",
    )(
        jnp.stack([append.slot.reshape(r), append.moved.reshape(r)]),
        jnp.concatenate(new, -1).astype(pool.dtype).reshape(r, 1, kv),
        lse,
        pool,
    )
