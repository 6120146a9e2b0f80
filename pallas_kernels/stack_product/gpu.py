"""`stack_product` on GPU, in Triton: a program computes a tile of columns from a part of the inputs.

Weights are read once and nothing else is large, so the speed depends on having enough bytes in flight. If there are few
columns, several programs share the inputs. XLA adds their sums afterwards, where it adds the residual anyway.
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
"""The size of a tile of weights, which is 16 KiB for 16-bit weights. A program has several in flight. For float32
there are half as many inputs."""
LEAST = 4
"""The least number of tiles of inputs that a program reads."""


def gpu(x, stack, layer, scale=None, interpret=None):
    (rows, inputs), columns = x.shape, stack.shape[2]
    tile_inputs = INPUTS * 2 // x.dtype.itemsize
    block = inputs if scale is None else inputs // scale.shape[1]
    require(
        "stack_product",
        "gpu",
        (x.dtype in DTYPES, f"float32 or bfloat16, not {x.dtype}"),
        (
            block == inputs or block % tile_inputs == 0,
            f"one scale for {tile_inputs} inputs or a multiple, not for {block}",
        ),
    )
    tiles, steps = pl.cdiv(columns, COLUMNS), pl.cdiv(inputs, tile_inputs)
    parts = max(1, min(PROGRAMS // tiles, steps // LEAST))
    kernel = functools.partial(
        _kernel,
        height=max(16, pl.next_power_of_2(rows)),
        tile_inputs=tile_inputs,
        steps=pl.cdiv(steps, parts),
        block=block,
    )
    partial_sums = pl.pallas_call(
        kernel,
        grid=(tiles, parts),
        out_shape=output((parts, rows, columns), jnp.float32, x),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=4),
        name="stack_product",
        interpret=gpu_interpret(interpret),
    )(layer.reshape(1), x, stack, *(() if scale is None else (scale,)))
    return partial_sums[0] if parts == 1 else partial_sums.sum(0)


def _kernel(layer_ref, x_ref, stack_ref, *refs, height, tile_inputs, steps, block):
    """`x_ref` [rows inputs], `stack_ref` [layers inputs columns], `refs`: the scale [layers blocks columns], if there
    is one, and the output [parts rows columns]."""
    *scale_ref, out_ref = refs
    (rows, inputs), columns = x_ref.shape, stack_ref.shape[2]
    layer, part = layer_ref[0], pl.program_id(1)
    row, column = jnp.arange(height), pl.program_id(0) * COLUMNS + jnp.arange(COLUMNS)
    valid_row, valid_column = row < rows, column < columns
    precision = lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None

    def add(step, sums):
        first = (part * steps + step) * tile_inputs
        input_index = first + jnp.arange(tile_inputs)
        valid = input_index < inputs
        x = plt.load(
            x_ref.at[row[:, None], input_index[None]], mask=valid_row[:, None] & valid[None], other=0
        )
        weights = plt.load(
            stack_ref.at[layer, input_index[:, None], column[None]],
            mask=valid[:, None] & valid_column[None],
            other=0.0,
        )
        product = plt.dot(x, weights.astype(x.dtype), precision=precision)
        for ref in scale_ref:
            scale_block = jnp.minimum(first // block, ref.shape[1] - 1)
            product *= plt.load(ref.at[layer, scale_block, column], mask=valid_column, other=0)[None]
        return sums + product

    sums = lax.fori_loop(0, steps, add, jnp.zeros((height, COLUMNS), jnp.float32))
    plt.store(
        out_ref.at[part, row[:, None], column[None]], sums, mask=valid_row[:, None] & valid_column[None]
    )
