"""Mixtures of experts on one device: the products of tokens with the experts that were chosen for them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.choose import target
from pallas_kernels.varying import alike

WithBias = tuple[Float[Array, "..."], Float[Array, "..."] | None]
"""The matrices of a layer's experts one below another [experts · inputs, outputs] and their biases [experts, outputs],
or those of all layers, with a leading layer axis."""
BLOCK = 32
"""Rows of one expert that are multiplied at a time, where there is no grouped product."""


def mixed(
    x: Float[Array, "b t d"],
    weight: Float[Array, "b t n"],
    chosen: Int[Array, "b t n"],
    gate_up: WithBias,
    down: WithBias,
    activate: Callable[[Float32[Array, "pairs f2"]], Float[Array, "pairs f"]],
    index: Int[Array, ""] | None,
) -> Float32[Array, "b t d"]:
    """Return the weighted sum of the outputs of the experts that are here.

    Args:
        weight: the weight of each chosen expert.
        chosen: the chosen experts; those outside the range of `gate_up` are another device's.
        activate: returns the experts' hidden layer from the product with `gate_up`.
        index: the layer, if the matrices are those of all layers.
    """
    width, count = x.shape[-1], gate_up[0].shape[-2] // x.shape[-1]
    expert = jnp.where((chosen >= 0) & (chosen < count), chosen, count).reshape(-1)
    order = jnp.argsort(expert)
    expert, token, weight = expert[order], order // chosen.shape[-1], weight.reshape(-1)[order]
    sizes = jnp.zeros(count, jnp.int32).at[expert].add(1, mode="drop")
    first = jnp.int32(0) if index is None else index * count

    def product(x, matrices: WithBias):
        weights, bias = matrices
        layers = weights.shape[0] if weights.ndim == 3 else 1
        y = _grouped(x, weights.reshape(layers * count, -1, weights.shape[-1]), sizes, first)
        if bias is None:
            return y
        return y + bias.reshape(layers * count, -1)[first + jnp.minimum(expert, count - 1)]

    inner = activate(product(x.reshape(-1, width)[token], gate_up))
    y = product(inner, down)
    y = jnp.where((expert < count)[:, None], y * weight[:, None].astype(jnp.float32), 0)
    return jnp.zeros((x.shape[0] * x.shape[1], width), jnp.float32).at[token].add(y).reshape(x.shape)


def _grouped(
    x: Float[Array, "p i"], weights: Float[Array, "e i o"], sizes: Int[Array, " n"], first: Int[Array, ""]
) -> Float32[Array, "p o"]:
    """Return the products of n groups of rows with n matrices, the `first` of which is a group's. Rows behind the last
    group are unspecified."""
    rows, count = x.shape[0], sizes.shape[0]
    if target().platform == "tpu":
        own = jax.lax.dynamic_slice_in_dim(weights, first, count)
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
        product = jnp.dot(own, weights[first + at], preferred_element_type=jnp.float32)
        # what a block writes behind its group, the next one overwrites
        return jax.lax.dynamic_update_slice_in_dim(y, product, start, 0), None

    y = jnp.zeros((rows + BLOCK, weights.shape[-1]), jnp.float32)
    # a backward pass would keep a copy of a matrix for each block
    one = jax.checkpoint(one, prevent_cse=False)
    return jax.lax.scan(one, alike(y, x, weights, start)[0], (start, at))[0][:rows]
