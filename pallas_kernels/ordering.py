"""Ordering of a write after a read, so that XLA does not copy the array."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def after(x: Int[Array, "*shape"], read: Float[Array, "..."]) -> Int[Array, "*shape"]:
    """Return `x`, made to depend on `read`.

    If a scan carries a pool, attends over it and then writes to it, and XLA is free to write first, XLA copies the
    whole pool at each step. An index `after(index, lse)` makes the write wait. (jax 0.10 drops
    `lax.optimization_barrier` too early on CPUs.)
    """
    never = jnp.max(read) > jnp.inf
    return x + never.astype(x.dtype)
