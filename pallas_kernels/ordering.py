"""Writing into what was just read, without a copy of it."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def after(x: Int[Array, "*shape"], read: Float[Array, "..."]) -> Int[Array, "*shape"]:
    """`x`, but not known before `read` is.

    A scan that carries a pool, attends over it and then writes to it copies the whole pool at each step wherever XLA
    is free to write first. If the write's index is `after(index, lse)` it is not. (`lax.optimization_barrier` is
    dropped too early on CPUs by jax 0.10.)
    """
    never = jnp.max(read) > jnp.inf
    return x + never.astype(x.dtype)
