"""Reproducible random numbers. Each is a hash of its seed, layer, head and text, so that it does not depend on batch,
chunking or mesh."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from kvjax.policies.views import Step


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Return a bijective 32-bit hash with full avalanche (MurmurHash3's finaliser)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _hash(*parts: Int[Array, "..."] | UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    x = jnp.uint32(0x9E3779B9)
    for part in parts:
        x = _mix(x ^ part.astype(jnp.uint32))
    return x


def uniform(*parts: Int[Array, "..."] | UInt32[Array, "..."]) -> Float[Array, "..."]:
    """Return uniform numbers in [0, 1), one for each combination of the parts, which are broadcast."""
    return (_hash(*parts) >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def no_text(batch: int) -> UInt32[Array, " b"]:
    """Return the hash of sequences without a token."""
    return jnp.zeros(batch, jnp.uint32)


def text_hash(before: UInt32[Array, " b"], step: Step) -> UInt32[Array, "b t"]:
    """Return the hash of each sequence up to each token of a call, that token included. `before` is the hash before the
    call.

    The hash of a sequence is the sum of hashes of (position, token id) over its tokens, so that it is the same in any
    chunking. Padding adds nothing.
    """
    assert step.token is not None
    each = jnp.where(step.position < 0, jnp.uint32(0), _hash(step.position, step.token))
    return before[:, None] + jnp.cumsum(each, 1, dtype=jnp.uint32)
