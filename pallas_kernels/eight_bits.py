"""Matrices in 8 bits, integers or floats (e4m3). Each output, or each output and block of inputs, has a scale."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Float32, Shaped

from pallas_kernels.choose import target

EIGHT_BITS = {"int8": jnp.dtype(jnp.int8), "fp8": jnp.dtype(jnp.float8_e4m3fn)}
"""The dtypes of 8 bits by their names."""
LARGEST = {EIGHT_BITS["int8"]: 127.0, EIGHT_BITS["fp8"]: 448.0}
"""The largest number of each."""


def quantised(
    x: Float[Array, "i o"], dtype: Any, blocks: int = 1
) -> tuple[Shaped[Array, "i o"], Float32[Array, "n o"]]:
    """Return a matrix in 8 bits and its scales: the largest magnitude of an output's weights, or of those in one of
    `blocks` equal blocks of its inputs, becomes the dtype's largest number. Numbers are rounded to the nearest. A mesh
    may split the inputs, between blocks if there are several."""
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
    """Return the matrix in floats, given its numbers in 8 bits and their scales, those of one device."""
    blocks = widened(values, jnp.float32).reshape(*scale.shape[:-1], -1, scale.shape[-1])
    return (blocks * scale[..., None, :]).astype(dtype).reshape(values.shape)


def widened(values: Shaped[Array, "*s"], dtype: Any) -> Float[Array, "*s"]:
    """Return numbers in a wider dtype, which holds all of them."""
    if values.dtype != jnp.float8_e4m3fn or target().platform != "cpu":
        return values.astype(dtype)
    # XLA's CPU backend (jax 0.10.2) takes five times as long; with these bits a float16 is the number · 2⁻⁸
    bits = lax.bitcast_convert_type(values, jnp.uint8).astype(jnp.uint16)
    halves = lax.bitcast_convert_type((bits & 0x80) << 8 | (bits & 0x7F) << 7, jnp.float16)
    return halves.astype(dtype) * jnp.asarray(256, dtype)
