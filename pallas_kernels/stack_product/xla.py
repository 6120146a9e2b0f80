"""`stack_product` in XLA: a slice, which a TPU reads in place and other backends may copy, and a product."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.choose import target
from pallas_kernels.eight_bits import as_floats, dequantised
from pallas_kernels.varying import alike

INPUTS = 64
"""Inputs whose products a CPU adds at a time, where there is one row and weights have 8 bits."""


def xla(x, stack, layer, scale=None):
    weights = lax.dynamic_index_in_dim(stack, layer, keepdims=False)
    if scale is None:
        return jnp.matmul(x, weights, preferred_element_type=jnp.float32)
    scale = lax.dynamic_index_in_dim(scale, layer, keepdims=False)
    if len(x) == 1 and target().platform == "cpu" and len(weights) // len(scale) % INPUTS == 0:
        return _one_row(x, weights, scale)
    if len(scale) > 1:
        return jnp.matmul(x, dequantised(weights, scale, x.dtype), preferred_element_type=jnp.float32)
    return jnp.matmul(x, as_floats(weights, x.dtype), preferred_element_type=jnp.float32) * scale


def _one_row(x, weights, scale):
    """Return x · weights, read as they are: a CPU's product (jax 0.10.2) first writes all of them in floats."""
    block = len(weights) // len(scale)

    def add(step, sums):
        rows = lax.dynamic_slice_in_dim(weights, step * INPUTS, INPUTS)
        own = lax.dynamic_slice_in_dim(x, step * INPUTS, INPUTS, 1).astype(jnp.float32)
        part = sum(own[:, at, None] * as_floats(rows[at], jnp.float32) for at in range(INPUTS))
        return sums + part * scale[step * INPUTS // block]

    sums = jnp.zeros((1, weights.shape[1]), jnp.float32)
    return lax.fori_loop(0, len(weights) // INPUTS, add, alike(sums, x, weights)[0])
