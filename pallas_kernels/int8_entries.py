"""Entries of a paged cache as int8 numbers with two scales, one for the key and one for the value.

Both scales are bfloat16s, side by side in one int32: the key's in the upper half, the value's in the lower one. They
are rounded up, so that no number lies beyond 127.
"""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int8, Int32

HALF = 16
"""Bits of a scale."""
LARGEST = 127


def quantised_entries(kv: Float[Array, "*s kv"]) -> tuple[Int8[Array, "*s kv"], Int32[Array, "*s"]]:
    """Return entries, each a key and its value side by side, as int8 numbers rounded to the nearest, and their
    scales."""
    parts = kv.astype(jnp.float32).reshape(*kv.shape[:-1], 2, -1)
    largest = jnp.abs(parts).max(-1)
    bits = lax.bitcast_convert_type(jnp.where(largest > 0, largest / LARGEST, 1), jnp.uint32)
    upper = (bits + ((1 << HALF) - 1)) >> HALF
    scale = lax.bitcast_convert_type(upper << HALF, jnp.float32)
    values = jnp.round(parts / scale[..., None]).astype(jnp.int8)
    both = upper[..., 0] << HALF | upper[..., 1]
    return values.reshape(kv.shape), lax.bitcast_convert_type(both, jnp.int32)


def scales(both: Int32[Array, "*s"]) -> tuple[Float32[Array, "*s"], Float32[Array, "*s"]]:
    """Return the scales of keys and of values."""
    parts = both & (-1 << HALF), both << HALF
    k, v = (lax.bitcast_convert_type(x, jnp.float32) for x in parts)
    return k, v


def dequantised_entries(
    values: Int8[Array, "*s kv"], both: Int32[Array, "*s"], dtype: DTypeLike
) -> Float[Array, "*s kv"]:
    """Return entries in floats, given their int8 numbers and their scales."""
    parts = values.astype(jnp.float32).reshape(*both.shape, 2, -1)
    return (parts * jnp.stack(scales(both), -1)[..., None]).reshape(values.shape).astype(dtype)


def with_value_scales(both: Int32[Array, "*s"], others: Int32[Array, "*s"]) -> Int32[Array, "*s"]:
    """Return the scales of the keys of `both` and of the values of `others`."""
    return both & (-1 << HALF) | others & ((1 << HALF) - 1)
