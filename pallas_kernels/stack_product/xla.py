"""`stack_product` in XLA: a slice and a product. TPUs read the slice in place; other backends may copy it."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.bits import item
from pallas_kernels.choose import target
from pallas_kernels.eight_bits import dequantised, widened
from pallas_kernels.varying import alike

INPUTS = {1: 64, 2: 64, 4: 16}
"""Inputs that are processed at a time for one row on a CPU, by the bytes of a weight."""
SUMS = 4
"""The number of independent sums of these products."""


def xla(x, stack, layer, scale=None):
    scale = None if scale is None else lax.dynamic_index_in_dim(scale, layer, keepdims=False)
    block = stack.shape[1] // (1 if scale is None else len(scale))
    if target().platform == "cpu" and len(x) == 1 and block % INPUTS[stack.dtype.itemsize] == 0:
        return _one_row(x, stack, layer, scale)
    weights = item(stack, layer)
    if scale is None:
        return jnp.matmul(x, weights, preferred_element_type=jnp.float32)
    if len(scale) > 1:
        return jnp.matmul(x, dequantised(weights, scale, x.dtype), preferred_element_type=jnp.float32)
    return jnp.matmul(x, widened(weights, x.dtype), preferred_element_type=jnp.float32) * scale


def _one_row(x, stack, layer, scale):
    """Return x · stack[layer] for one row of x on a CPU, reading the layer's rows in place.

    XLA's own product (jax 0.10.2) first copies the layer, and then converts narrow weights to float32 in memory.
    """
    (_, inputs, columns), step = stack.shape, INPUTS[stack.dtype.itemsize]

    def add(index, sums):
        first = index * step
        values = lax.dynamic_slice(x, (0, first), (1, step))[0].astype(jnp.float32)

        def product(at):
            return values[at] * widened(item(stack, layer, first + at), jnp.float32)

        # The sums do not wait for one another.
        parts = [sum(product(at) for at in range(start, step, SUMS)) for start in range(SUMS)]
        return sums + sum(parts) * (1 if scale is None else scale[first * len(scale) // inputs])

    sums = jnp.zeros((1, columns), jnp.float32)
    return lax.fori_loop(0, inputs // step, add, alike(sums, x, stack)[0])
