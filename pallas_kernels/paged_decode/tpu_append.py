"""Writing a decoded token on TPU.

TPU memory is written in tiles of 8 entries, or 32 int8 entries. The tiles of all rows are fetched at once, changed and
written back.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.blocks import divisor
from pallas_kernels.interpret import tpu_interpret
from pallas_kernels.paged_decode.append import Append, as_stored
from pallas_kernels.varying import output

ROWS = 64
"""The most rows of a step, whose tiles are in VMEM together."""
SLOT, MOVED = range(2)


def tile_entries(dtype: Any) -> int:
    """Return the number of entries of this dtype in a memory tile."""
    return 32 if dtype == jnp.int8 else 8


def _kernel(places_ref, new_ref, lse_ref, pool_ref, out_ref, tiles, sem, *, rows: int):
    del lse_ref, pool_ref  # lse is an input so that attention runs first. The pool is also the output.
    first = pl.program_id(0) * rows
    (pages, page, _), size = out_ref.shape, tile_entries(out_ref.dtype)

    def place(row, which):
        """Return the index of a row's entry, and True if it lies in the pool."""
        index = places_ref[which, first + row]
        return index, index < pages * page

    def each_copy(act):
        """Run `act(fetch, put)` for every tile. These are its copies from the pool and back."""

        def copies(row, _):
            for which in (SLOT, MOVED):
                index, inside = place(row, which)
                begin = lax.rem(index, page) // size * size
                in_pool = out_ref.at[lax.div(index, page), pl.ds(pl.multiple_of(begin, size), size)]
                in_vmem = tiles.at[row, which]
                fetch, put = (
                    pltpu.make_async_copy(*x, sem) for x in ((in_pool, in_vmem), (in_vmem, in_pool))
                )
                pl.when(inside)(functools.partial(act, fetch, put))

        lax.fori_loop(0, rows, copies, None)

    def change(row, _):
        entry = lax.broadcasted_iota(jnp.int32, tiles.shape[2:], 0)
        (slot, _), (moved, _) = place(row, SLOT), place(row, MOVED)
        at = entry == lax.rem(slot, size)
        # float32 represents all numbers, and its tiles have the shape of the mask.
        x, target, new = (y.astype(jnp.float32) for y in (tiles[row, SLOT], tiles[row, MOVED], new_ref[row]))
        old = jnp.where(at, x, 0).sum(0, keepdims=True)
        tiles[row, MOVED] = jnp.where(entry == lax.rem(moved, size), old, target).astype(tiles.dtype)
        tiles[row, SLOT] = jnp.where(at, new, x).astype(tiles.dtype)

    each_copy(lambda fetch, put: fetch.start())
    each_copy(lambda fetch, put: fetch.wait())
    lax.fori_loop(0, rows, change, None)
    each_copy(lambda fetch, put: put.start())
    each_copy(lambda fetch, put: put.wait())


def append_tokens(pool, append: Append | None, new, lse, interpret: Any):
    """Do what `append.append_tokens` does, in place."""
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
            scratch_shapes=[
                pltpu.VMEM((rows, 2, tile_entries(pool.dtype), kv), pool.dtype),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        out_shape=output(pool.shape, pool.dtype, pool),
        input_output_aliases={3: 0},
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        interpret=tpu_interpret(interpret),
        name="paged_decode_append",
    )(
        jnp.stack([append.slot.reshape(r), append.moved.reshape(r)]),
        as_stored(new, pool).reshape(r, 1, kv),
        lse,
        pool,
    )
