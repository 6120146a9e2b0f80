"""Mixtures of experts on one device: products of tokens with the experts chosen for them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from kvjax.models.matrix import Matrix
from pallas_kernels.choose import target
from pallas_kernels.eight_bits import dequantised
from pallas_kernels.varying import alike

BLOCK = 32
"""Rows of one expert that are multiplied at a time on platforms without a grouped product."""


def mix_experts(
    x: Float[Array, "b t d"],
    weight: Float[Array, "b t n"],
    chosen: Int[Array, "b t n"],
    gate_up: Matrix,
    down: Matrix,
    activate: Callable[[Float32[Array, "pairs f2"]], Float[Array, "pairs f"]],
    index: Int[Array, ""] | None,
) -> Float32[Array, "b t d"]:
    """Return the weighted sum of the outputs of this device's experts.

    Args:
        weight: the weight of each chosen expert.
        chosen: the chosen experts; numbers outside the range of `gate_up` are experts of another device.
        gate_up: the experts' matrices, stacked along the inputs: [experts · inputs, outputs], scales [experts · blocks,
            outputs] and biases [experts, outputs].
        down: the experts' output matrices, stacked in the same way.
        activate: returns the experts' hidden layer from the product with `gate_up`.
        index: the layer, if the matrices are stacked over all layers.
    """
    width, count = x.shape[-1], gate_up.weight.shape[-2] // x.shape[-1]
    expert = jnp.where((chosen >= 0) & (chosen < count), chosen, count).reshape(-1)
    order = jnp.argsort(expert)
    expert, token, weight = expert[order], order // chosen.shape[-1], weight.reshape(-1)[order]
    sizes = jnp.zeros(count, jnp.int32).at[expert].add(1, mode="drop")
    first = jnp.int32(0) if index is None else index * count

    def product(x, matrices: Matrix):
        layers = matrices.weight.shape[0] if matrices.weight.ndim == 3 else 1

        by_expert: Matrix = jax.tree.map(lambda x: x.reshape(layers * count, -1, x.shape[-1]), matrices)
        y = _grouped(x, by_expert, sizes, first)
        bias = by_expert.bias
        return y if bias is None else y + bias[first + jnp.minimum(expert, count - 1), 0]

    inner = activate(product(x.reshape(-1, width)[token], gate_up))
    y = product(inner, down)
    y = jnp.where((expert < count)[:, None], y * weight[:, None].astype(jnp.float32), 0)
    return jnp.zeros((x.shape[0] * x.shape[1], width), jnp.float32).at[token].add(y).reshape(x.shape)


def _grouped(
    x: Float[Array, "p i"], matrices: Matrix, sizes: Int[Array, " n"], first: Int[Array, ""]
) -> Float32[Array, "p o"]:
    """Return the products of n groups of rows with n consecutive matrices, beginning at the `first`, without biases.
    Rows after the last group are unspecified.

    `matrices`: weights [matrices, inputs, outputs] and scales [matrices, blocks, outputs].
    """
    weight, scale, _ = matrices
    rows, count = x.shape[0], sizes.shape[0]
    if target().platform == "tpu":
        local = jax.lax.dynamic_slice_in_dim(weight, first, count)
        if scale is not None:
            local = dequantised(local, jax.lax.dynamic_slice_in_dim(scale, first, count), x.dtype)
        return jax.lax.ragged_dot(x, local, sizes, preferred_element_type=jnp.float32)
    # on other platforms ragged_dot multiplies every row with every matrix
    blocks = -(-sizes // BLOCK)
    block_ends, rows_before = jnp.cumsum(blocks), jnp.cumsum(sizes) - sizes
    # each group has at most one partial block
    block = jnp.arange(rows // BLOCK + min(count, rows))
    group = jnp.searchsorted(block_ends, block, side="right")
    index = jnp.minimum(group, count - 1)
    start = rows_before[index] + (block - (block_ends - blocks)[index]) * BLOCK
    start = jnp.where(group < count, start, rows)
    x = jnp.pad(x, ((0, BLOCK), (0, 0)))

    def multiply_block(y, inputs):
        start, index = inputs
        block_rows = jax.lax.dynamic_slice_in_dim(x, start, BLOCK)
        matrix = weight[first + index]
        if scale is not None:
            matrix = dequantised(matrix, scale[first + index], x.dtype)
        product = jnp.dot(block_rows, matrix, preferred_element_type=jnp.float32)
        # the next block overwrites the rows that this one writes past the end of its group
        return jax.lax.dynamic_update_slice_in_dim(y, product, start, 0), None

    y = jnp.zeros((rows + BLOCK, weight.shape[-1]), jnp.float32)
    # a backward pass would keep a copy of a matrix for each block
    multiply_block = jax.checkpoint(multiply_block, prevent_cse=False)
    return jax.lax.scan(multiply_block, alike(y, x, weight, start)[0], (start, index))[0][:rows]
