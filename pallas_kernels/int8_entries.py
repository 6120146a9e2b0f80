"""Entries of a paged cache as int8 numbers with two scales, one for the key and one for the value.

Both scales are bfloat16 and are packed in one int32: the key's in the upper half, the value's in the lower half. They
are rounded up, so that no number exceeds 127.
"""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int8, Int32

HALF = 16
"""Bits of a scale."""
LARGEST = 127


def quantised_entries(kv: Float[Array, "*s kv"]) -> tuple[Int8[Array, "*s kv"], Int32[Array, "*s"]]:
    """Round entries, each a key and its value side by side, to int8 numbers. Return these and their packed scales."""
    parts = kv.astype(jnp.float32).reshape(*kv.shape[:-1], 2, -1)
    largest = jnp.abs(parts).max(-1)
    bits = lax.bitcast_convert_type(jnp.where(largest > 0, largest / LARGEST, 1), jnp.uint32)
    upper = (bits + ((1 << HALF) - 1)) >> HALF
    scale = lax.bitcast_convert_type(upper << HALF, jnp.float32)
    values = jnp.round(parts / scale[..., None]).astype(jnp.int8)
    packed = upper[..., 0] << HALF | upper[..., 1]
    return values.reshape(kv.shape), lax.bitcast_convert_type(packed, jnp.int32)


def scales(packed: Int32[Array, "*s"]) -> tuple[Float32[Array, "*s"], Float32[Array, "*s"]]:
    """Unpack the scales of keys and values."""
    parts = packed & (-1 << HALF), packed << HALF
    k, v = (lax.bitcast_convert_type(x, jnp.float32) for x in parts)
    return k, v


def dequantised_entries(
    values: Int8[Array, "*s kv"], packed: Int32[Array, "*s"], dtype: DTypeLike
) -> Float[Array, "*s kv"]:
    """Return entries in floats, given their int8 numbers and their packed scales."""
    parts = values.astype(jnp.float32).reshape(*packed.shape, 2, -1)
    return (parts * jnp.stack(scales(packed), -1)[..., None]).reshape(values.shape).astype(dtype)


def with_value_scales(packed: Int32[Array, "*s"], other: Int32[Array, "*s"]) -> Int32[Array, "*s"]:
    """Return packed scales with the keys' scales of `packed` and the values' scales of `other`."""
    return packed & (-1 << HALF) | other & ((1 << HALF) - 1)
