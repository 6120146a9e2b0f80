"""Floats of 8 and 16 bits as integers of the same bits, in which a CPU stores pages and scans the layers' weights.

XLA's CPU backend (jax 0.10.2) cannot scatter such floats or slice them out of a stack in a loop. It converts the whole
array to wider ones: the pool (and back) in every layer of every step, the weights in every call. It moves integers as
they are, so that only what is read is converted.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

BITS = {1: jnp.uint8, 2: jnp.uint16}
"""The integers that hold the bits of floats, by their bytes."""


def as_bits(x: Shaped[Array, "*s"]) -> Shaped[Array, "*s"]:
    """The bits of floats of 8 or 16 bits; `x` itself if it holds other numbers."""
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize not in BITS:
        return x
    return lax.bitcast_convert_type(x, BITS[x.dtype.itemsize])


def as_floats(x: Shaped[Array, "*s"], dtype: Any) -> Shaped[Array, "*s"]:
    """The floats of `dtype` whose bits `x` holds; `x` itself if it holds other numbers.

    Raises ValueError if `x` holds bits and `dtype` has more or fewer of them.
    """
    if x.dtype not in BITS.values():
        return x
    if jnp.dtype(dtype).itemsize != x.dtype.itemsize:
        raise ValueError(
            f"the bits are those of {8 * x.dtype.itemsize}-bit floats, not of {jnp.dtype(dtype).name}"
        )
    return lax.bitcast_convert_type(x, dtype)
