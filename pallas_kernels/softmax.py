"""The pieces of an online softmax: float32 running maximum, sum and output over tiles of keys.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); FlashAttention (Dao et al., 2022).
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

LOG2E, LN2 = math.log2(math.e), math.log(2)
"""Factors between exponents of 2, which kernels compute, and of e."""
MASKED = -1e30
"""The logit of a key that a query may not see: finite, so that no difference of two of them is NaN."""

State = tuple[jax.Array, jax.Array, jax.Array]
"""Maximum `[… q]`, sum of exponentials `[… q]` and unnormalised output `[… q h]`, all float32."""


def product(subscripts: str, x: jax.Array, y: jax.Array) -> Float[Array, "..."]:
    """Compute an einsum with float32 sums. It is exact if an argument is float32, for which GPUs would by default use
    TF32 and TPUs bfloat16."""
    exact = jnp.float32 in (x.dtype, y.dtype)
    precision = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT
    return jnp.einsum(subscripts, x, y, precision=precision, preferred_element_type=jnp.float32)


def dot(x: jax.Array, y: jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """Multiply the matrices of a kernel with float32 sums, exactly if the arguments are float32."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    dims = ((contract[0],), (contract[1],)), ((), ())
    return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)


def logits(q: Float[Array, "*r q h"], k: Float[Array, "*r s h"]) -> Float[Array, "*r q s"]:
    """Return q · k / sqrt(h) in float32, scaled after the product: scaling a bfloat16 q first costs three digits."""
    return product("...qh,...sh->...qs", q, k) * (q.shape[-1] ** -0.5)


def start(q: Float[Array, "*r q h"]) -> State:
    """Return the state before any key."""
    row = jnp.zeros_like(q[..., 0], jnp.float32)
    return row + MASKED, row, jnp.zeros_like(q, jnp.float32)


def update(state: State, x: Float[Array, "*r q s"], v: Float[Array, "*r s h"]) -> State:
    """Return the state after the keys with logits `x` (MASKED where unseen) and values `v`."""
    m, l, o = state
    m_new = jnp.maximum(m, x.max(-1))
    p = jnp.exp(x - m_new[..., None])
    kept = jnp.exp(m - m_new)
    pv = product("...qs,...sh->...qh", p.astype(v.dtype), v)
    return m_new, l * kept + p.sum(-1), o * kept[..., None] + pv


def finish(state: State) -> tuple[Float[Array, "*r q h"], Float[Array, "*r q"]]:
    """Return output and log-sum-exp in float32. They are 0 and -inf for a query that saw no key."""
    m, l, o = state
    empty = m <= MASKED / 2  # not its opposite, so that a NaN among the visible logits stays NaN
    l = jnp.where(empty, 1, l)
    return jnp.where(empty[..., None], 0, o / l[..., None]), jnp.where(empty, -jnp.inf, m + jnp.log(l))


def with_sink(
    o: Float[Array, "b n t h"], lse: Float[Array, "b n t"], sink: Float[Array, " n"] | None
) -> tuple[Float[Array, "b n t h"], Float[Array, "b n t"]]:
    """Add an attention sink, a logit without a value, to each query head's softmax. Return output and log-sum-exp.

    sink: the logit of each query head. None: nothing is added.
    """
    if sink is None:
        return o, lse
    total = jnp.logaddexp(lse, sink.astype(jnp.float32)[:, None])
    return (o.astype(jnp.float32) * jnp.exp(lse - total)[..., None]).astype(o.dtype), total


def merge(
    o1: Float[Array, "b n t h"],
    lse1: Float[Array, "b n t"],
    o2: Float[Array, "b n t h"],
    lse2: Float[Array, "b n t"],
) -> tuple[Float[Array, "b n t h"], Float[Array, "b n t"]]:
    """Merge the attention over two disjoint sets of keys into the attention over their union.

    Both results are float32, so that the caller can merge many sets and round once. A set in which a query saw nothing
    (lse = -inf) does not change the other.
    """
    m = jnp.maximum(lse1, lse2)
    m = jnp.where(jnp.isfinite(m), m, 0)
    w1, w2 = jnp.exp(lse1 - m), jnp.exp(lse2 - m)
    seen = w1 + w2 > 0
    total = jnp.where(seen, w1 + w2, 1)
    o = (w1 / total)[..., None] * o1.astype(jnp.float32) + (w2 / total)[..., None] * o2.astype(jnp.float32)
    return o, jnp.where(seen, m + jnp.log(total), -jnp.inf)
