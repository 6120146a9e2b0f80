"""Ordering of a write after a read, so that XLA does not copy the array."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def after(x: Int[Array, "*shape"], read: Float[Array, "..."]) -> Int[Array, "*shape"]:
    """Return `x`, made to depend on `read`.

    A scan that carries a pool, attends over it and then writes to it copies the whole pool at each step if XLA is free
    to write first. With `after(index, lse)` as the write's index it is not. (jax 0.10 drops
    `lax.optimization_barrier` too early on CPUs.)
    """
    never = jnp.max(read) > jnp.inf
    return x + never.astype(x.dtype)
