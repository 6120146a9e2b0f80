"""Observation buffers: arrays that an eviction records for each of the last tokens. A buffer has `w` slots; position i
is in slot i mod w.

A buffer holds all layers of a token and is written once per call. A buffer that the scan over layers carried would be
copied in every step, and 128 hidden states are too large for that.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt16

from pallas_kernels.bits import as_bits, as_floats

Buffer = Float[Array, "b w l *k d"] | UInt16[Array, "b w l *k d"]
"""An observation buffer. If the pool holds bits of 16-bit floats as integers, so does the buffer."""


def newest(x: Float[Array, "b *k t d"], slots: int, valid: Int[Array, " b"]) -> Float[Array, "b *k n d"]:
    """Return the last n = min(slots, t) of a call's first `valid` tokens, in order. If `valid` is less than n,
    unspecified tokens follow."""
    tokens = x.shape[-2]
    index = jnp.minimum(newest_indices(min(slots, tokens), slots, valid), tokens - 1)
    return jnp.take_along_axis(x, index[:, None, :, None] if x.ndim == 4 else index[..., None], -2)


def written(
    buffer: Buffer, new: Float[Array, "l b *k n d"], seen: Int[Array, " b"], valid: Int[Array, " b"]
) -> Buffer:
    """Return the buffer after the `newest` of a call's first `valid` tokens were written. `seen`: tokens before the
    call."""
    slots = buffer.shape[1]
    index = newest_indices(new.shape[-2], slots, valid)
    slot = jnp.where(index < valid[:, None], (seen[:, None] + index) % slots, slots)
    new = jnp.moveaxis(new, (1, -2), (0, 1))
    new = as_bits(new) if buffer.dtype == jnp.uint16 else new
    return buffer.at[jnp.arange(len(seen))[:, None], slot].set(new, mode="drop")


def by_layer(buffer: Buffer, seen: Int[Array, " b"], dtype: Any) -> Float[Array, "l b *k w d"]:
    """Return each layer's numbers, the oldest token first; unspecified where there was no token. dtype: the dtype of
    the numbers, whose bits `buffer` may hold."""
    slot = (seen[:, None] + jnp.arange(buffer.shape[1])) % buffer.shape[1]
    x = buffer[jnp.arange(len(seen))[:, None], slot]
    return as_floats(jnp.moveaxis(x, (2, 1), (0, -2)), dtype)


def newest_indices(count: int, slots: int, valid: Int[Array, " b"]) -> Int[Array, "b n"]:
    """Return the indices of the `count` of the call's tokens that are recorded: the last `slots` valid ones."""
    return jnp.arange(count) + jnp.maximum(valid - slots, 0)[:, None]
