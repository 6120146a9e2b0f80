"""Mixtures of experts on one device: the products of tokens with the experts that were chosen for them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from kvjax.models.matrix import Matrix
from pallas_kernels.choose import target
from pallas_kernels.eight_bits import dequantised
from pallas_kernels.varying import alike

BLOCK = 32
"""Rows of one expert that are multiplied at a time, where there is no grouped product."""


def mixed(
    x: Float[Array, "b t d"],
    weight: Float[Array, "b t n"],
    chosen: Int[Array, "b t n"],
    gate_up: Matrix,
    down: Matrix,
    activate: Callable[[Float32[Array, "pairs f2"]], Float[Array, "pairs f"]],
    index: Int[Array, ""] | None,
) -> Float32[Array, "b t d"]:
    """Return the weighted sum of the outputs of the experts that are here.

    Args:
        weight: the weight of each chosen expert.
        chosen: the chosen experts; those outside the range of `gate_up` are another device's.
        gate_up: the experts' matrices, one below another: [experts · inputs, outputs], scales [experts · blocks,
            outputs] and biases [experts, outputs].
        down: likewise.
        activate: returns the experts' hidden layer from the product with `gate_up`.
        index: the layer, if the matrices are those of all layers.
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
    """Return the products of n groups of rows with n matrices, the `first` of which is a group's, without biases. Rows
    behind the last group are unspecified.

    `matrices`: weights [matrices, inputs, outputs] and scales [matrices, blocks, outputs].
    """
    weight, scale, _ = matrices
    rows, count = x.shape[0], sizes.shape[0]
    if target().platform == "tpu":
        own = jax.lax.dynamic_slice_in_dim(weight, first, count)
        if scale is not None:
            own = dequantised(own, jax.lax.dynamic_slice_in_dim(scale, first, count), x.dtype)
        return jax.lax.ragged_dot(x, own, sizes, preferred_element_type=jnp.float32)
    # elsewhere that would multiply every row with every matrix
    need = -(-sizes // BLOCK)
    stop, before = jnp.cumsum(need), jnp.cumsum(sizes) - sizes
    # of each group at most one block is not full
    block = jnp.arange(rows // BLOCK + min(count, rows))
    group = jnp.searchsorted(stop, block, side="right")
    at = jnp.minimum(group, count - 1)
    start = jnp.where(group < count, before[at] + (block - (stop - need)[at]) * BLOCK, rows)
    x = jnp.pad(x, ((0, BLOCK), (0, 0)))

    def one(y, inputs):
        start, at = inputs
        own = jax.lax.dynamic_slice_in_dim(x, start, BLOCK)
        matrix = weight[first + at]
        if scale is not None:
            matrix = dequantised(matrix, scale[first + at], x.dtype)
        product = jnp.dot(own, matrix, preferred_element_type=jnp.float32)
        # what a block writes behind its group, the next one overwrites
        return jax.lax.dynamic_update_slice_in_dim(y, product, start, 0), None

    y = jnp.zeros((rows + BLOCK, weight.shape[-1]), jnp.float32)
    # a backward pass would keep a copy of a matrix for each block
    one = jax.checkpoint(one, prevent_cse=False)
    return jax.lax.scan(one, alike(y, x, weight, start)[0], (start, at))[0][:rows]
