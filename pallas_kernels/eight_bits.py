"""Matrices of 8-bit integers or floats (e4m3), with a scale for each output or for each output and block of inputs."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Float32, Shaped

from pallas_kernels.choose import target

EIGHT_BITS = {"int8": jnp.dtype(jnp.int8), "fp8": jnp.dtype(jnp.float8_e4m3fn)}
"""8-bit dtypes by name."""
LARGEST = {EIGHT_BITS["int8"]: 127.0, EIGHT_BITS["fp8"]: 448.0}
"""The largest number of each dtype."""


def quantised(
    x: Float[Array, "i o"], dtype: Any, blocks: int = 1
) -> tuple[Shaped[Array, "i o"], Float32[Array, "n o"]]:
    """Return a matrix in 8 bits and its scales.

    The largest magnitude among the weights of an output, or of an output and one of `blocks` equal blocks of inputs,
    becomes the dtype's largest number. Numbers are rounded to the nearest. A mesh may split the inputs; if there are
    several blocks, it must split them between blocks.
    """
    inputs, outputs = jax.typeof(x).sharding.spec
    spec = PartitionSpec(inputs, None, outputs) if blocks > 1 else PartitionSpec(None, inputs, outputs)
    y = jnp.reshape(x.astype(jnp.float32), (blocks, -1, x.shape[1]), out_sharding=spec)
    largest = jnp.abs(y).max(1)
    scale = jnp.where(largest > 0, largest / LARGEST[dtype], 1)
    y = y / scale[:, None]
    values = (jnp.round(y) if dtype == jnp.int8 else y).astype(dtype)
    return jnp.reshape(values, x.shape, out_sharding=PartitionSpec(inputs, outputs)), scale


def dequantised(
    values: Shaped[Array, "*s i o"], scale: Float32[Array, "*s n o"], dtype: Any
) -> Float[Array, "*s i o"]:
    """Return the matrix in floats, given its 8-bit numbers and their scales on one device."""
    blocks = widened(values, jnp.float32).reshape(*scale.shape[:-1], -1, scale.shape[-1])
    return (blocks * scale[..., None, :]).astype(dtype).reshape(values.shape)


def widened(values: Shaped[Array, "*s"], dtype: Any) -> Float[Array, "*s"]:
    """Convert numbers to a wider dtype, which represents all of them."""
    if values.dtype != jnp.float8_e4m3fn or target().platform != "cpu":
        return values.astype(dtype)
    # XLA's CPU backend (jax 0.10.2) takes five times as long. A float16 with these bits is the number · 2⁻⁸.
    bits = lax.bitcast_convert_type(values, jnp.uint8).astype(jnp.uint16)
    halves = lax.bitcast_convert_type((bits & 0x80) << 8 | (bits & 0x7F) << 7, jnp.float16)
    return halves.astype(dtype) * jnp.asarray(256, dtype)
