"""16-bit floats as integers of the same bits: how pages are stored on a CPU, and how layers' weights are scanned there.

XLA's CPU backend (jax 0.10.2) scatters no 16-bit floats and takes none out of a stack in a loop: it converts the whole
array to float32, the pool and back in every layer of every step, the weights in every call. Integers it moves as they
are, and what is read of them is converted alone.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped, UInt16


def as_bits(x: Float[Array, "*s"]) -> UInt16[Array, "*s"]:
    """The bits of 16-bit floats."""
    return lax.bitcast_convert_type(x, jnp.uint16)


def as_floats(x: Shaped[Array, "*s"], dtype: Any) -> Float[Array, "*s"]:
    """The floats of `dtype` whose bits `x` holds; `x` itself if it holds floats.

    Raises ValueError for bits of a dtype that has not 16 of them.
    """
    if x.dtype != jnp.uint16:
        return x
    if jnp.dtype(dtype).itemsize != 2:
        raise ValueError(f"pages hold the bits of 16-bit floats, but the queries are {jnp.dtype(dtype).name}")
    return lax.bitcast_convert_type(x, dtype)
