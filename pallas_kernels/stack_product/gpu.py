"""`stack_product` on GPU, in Triton: a program has a tile of columns and a part of the inputs.

Weights are read once and nothing else is large, so the speed depends on having enough bytes in flight. In a product
with few columns several programs share the inputs. Their sums are added afterwards in XLA, which has a residual to add
there anyway.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.interpret import gpu_interpret
from pallas_kernels.supported import DTYPES, require
from pallas_kernels.varying import output

PROGRAMS = 264
"""Programs that fill a device: two for each of 132 multiprocessors."""
COLUMNS, INPUTS = 64, 128
"""The size of a tile of weights, 16 KiB of 16-bit ones. A program has several in flight. A tile of float32 inputs has
half as many."""
LEAST = 4
"""The least number of tiles of inputs that a program reads."""


def gpu(x, stack, layer, scale=None, interpret=None):
    (rows, inputs), columns = x.shape, stack.shape[2]
    deep = INPUTS * 2 // x.dtype.itemsize
    block = inputs if scale is None else inputs // scale.shape[1]
    require(
        "stack_product",
        "gpu",
        (x.dtype in DTYPES, f"float32 or bfloat16, not {x.dtype}"),
        (block == inputs or block % deep == 0, f"one scale for {deep} inputs or a multiple, not for {block}"),
    )
    tiles, steps = pl.cdiv(columns, COLUMNS), pl.cdiv(inputs, deep)
    parts = max(1, min(PROGRAMS // tiles, steps // LEAST))
    kernel = functools.partial(
        _kernel, height=max(16, pl.next_power_of_2(rows)), deep=deep, steps=pl.cdiv(steps, parts), block=block
    )
    found = pl.pallas_call(
        kernel,
        grid=(tiles, parts),
        out_shape=output((parts, rows, columns), jnp.float32, x),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=4),
        name="stack_product",
        interpret=gpu_interpret(interpret),
    )(layer.reshape(1), x, stack, *(() if scale is None else (scale,)))
    return found[0] if parts == 1 else found.sum(0)


def _kernel(layer_ref, x_ref, stack_ref, *refs, height, deep, steps, block):
    """`x_ref` [rows inputs], `stack_ref` [layers inputs columns], of `refs` the first [layers blocks columns], if there
    are two, and the last [parts rows columns]."""
    *scale_ref, out_ref = refs
    (rows, inputs), columns = x_ref.shape, stack_ref.shape[2]
    layer, part = layer_ref[0], pl.program_id(1)
    row, column = jnp.arange(height), pl.program_id(0) * COLUMNS + jnp.arange(COLUMNS)
    real, inside = row < rows, column < columns
    precision = lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None

    def add(step, sums):
        first = (part * steps + step) * deep
        place = first + jnp.arange(deep)
        there = place < inputs
        x = plt.load(x_ref.at[row[:, None], place[None]], mask=real[:, None] & there[None], other=0)
        weights = plt.load(
            stack_ref.at[layer, place[:, None], column[None]], mask=there[:, None] & inside[None], other=0.0
        )
        product = plt.dot(x, weights.astype(x.dtype), precision=precision)
        for ref in scale_ref:
            own = jnp.minimum(first // block, ref.shape[1] - 1)
            product *= plt.load(ref.at[layer, own, column], mask=inside, other=0)[None]
        return sums + product

    sums = lax.fori_loop(0, steps, add, jnp.zeros((height, COLUMNS), jnp.float32))
    plt.store(out_ref.at[part, row[:, None], column[None]], sums, mask=real[:, None] & inside[None])
