"""16-bit floats as integers of the same bits, in which a CPU stores pages and scans the layers' weights.

XLA's CPU backend (jax 0.10.2) cannot scatter 16-bit floats or slice them out of a stack in a loop. It converts the
whole array to float32: the pool (and back) in every layer of every step, the weights in every call. It moves integers
as they are, so that only what is read is converted.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped, UInt16


def as_bits(x: Float[Array, "*s"]) -> UInt16[Array, "*s"]:
    """The bits of 16-bit floats."""
    return lax.bitcast_convert_type(x, jnp.uint16)


def as_floats(x: Shaped[Array, "*s"], dtype: Any) -> Shaped[Array, "*s"]:
    """The floats of `dtype` whose bits `x` holds; `x` itself if it holds other numbers.

    Raises ValueError if `x` holds bits and `dtype` does not have 16.
    """
    if x.dtype != jnp.uint16:
        return x
    if jnp.dtype(dtype).itemsize != 2:
        raise ValueError(f"pages hold the bits of 16-bit floats, but the queries are {jnp.dtype(dtype).name}")
    return lax.bitcast_convert_type(x, dtype)
