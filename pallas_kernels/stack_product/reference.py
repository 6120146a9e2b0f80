"""The definition of `stack_product`, for tests, in float32, or in float64 if given."""

import jax.numpy as jnp


def reference(x, stack, layer, scale=None):
    exact = jnp.promote_types(x.dtype, jnp.float32)
    weights = stack[layer].astype(exact)
    if scale is not None:
        weights = weights * jnp.repeat(scale[layer].astype(exact), len(weights) // scale.shape[1], 0)
    return jnp.matmul(x.astype(exact), weights, precision="highest")
