"""Floats of 8 and 16 bits as integers with the same bits. CPUs store pages in this form, and read weights in it.

XLA's CPU backend (jax 0.10.2) cannot scatter such floats or slice them out of a stack in a loop. It converts the whole
array to wider floats: the pool (and back) in every layer of every step, the weights in every call. Integers are moved
without conversion, so only the numbers that are read are converted.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped

from pallas_kernels.choose import target

BITS = {1: jnp.uint8, 2: jnp.uint16}
"""Integer dtypes by the number of bytes of the floats whose bits they hold."""


def as_bits(x: Shaped[Array, "*s"]) -> Shaped[Array, "*s"]:
    """Return the bits of floats of 8 or 16 bits, and `x` itself if it holds other numbers."""
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize not in BITS:
        return x
    return lax.bitcast_convert_type(x, BITS[x.dtype.itemsize])


def as_floats(x: Shaped[Array, "*s"], dtype: Any) -> Shaped[Array, "*s"]:
    """Return the floats of `dtype` whose bits `x` holds, and `x` itself if it holds other numbers.

    Raises ValueError if `x` holds bits of floats of another size.
    """
    if x.dtype not in BITS.values():
        return x
    if jnp.dtype(dtype).itemsize != x.dtype.itemsize:
        raise ValueError(
            f"the bits are those of {8 * x.dtype.itemsize}-bit floats, not of {jnp.dtype(dtype).name}"
        )
    return lax.bitcast_convert_type(x, dtype)


def item(stack: Shaped[Array, "..."], *index: Int[Array, ""]) -> Shaped[Array, "..."]:
    """Return `stack[index]`. A CPU reads only this part of a stack of floats of 8 or 16 bits."""
    sizes = *(1 for _ in index), *stack.shape[len(index) :]

    def read(stack, index):
        start = *index, *(0 for _ in stack.shape[len(index) :])
        return lax.squeeze(lax.dynamic_slice(stack, start, sizes), range(len(index)))

    if target().platform != "cpu":
        return read(stack, index)
    # Without the barrier XLA would take the bits of the whole stack before the loops around this, and store them. It
    # would also take them once for several items, and then store them too.
    floats, index = lax.optimization_barrier((stack, index))
    return as_floats(read(as_bits(floats), index), stack.dtype)
