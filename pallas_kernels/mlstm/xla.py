"""`mlstm` in XLA, chunk after chunk. Tokens of a chunk see each other through matrix products, and earlier tokens
through the memory. The cost is linear in the number of tokens."""

import jax
import jax.numpy as jnp
from jax import lax

EPSILON = 1e-6
CHUNK = 64
"""The default number of tokens of a chunk."""


def xla(q, k, v, log_i, log_f, memory, normaliser, chunk):
    t = q.shape[2]
    chunk = min(chunk or CHUNK, t)
    count = -(-t // chunk)

    def chunks(x, fill=0.0):
        padding = ((0, 0),) * 2 + ((0, count * chunk - t),) + ((0, 0),) * (x.ndim - 3)
        x = jnp.pad(x, padding, constant_values=fill)
        return jnp.moveaxis(x.reshape(*x.shape[:2], count, chunk, *x.shape[3:]), 2, 0)

    parts = chunks(q), chunks(k), chunks(v), chunks(log_i, -jnp.inf), chunks(log_f)
    # Intermediate results of a chunk are cheap to recompute; saved, they would dominate the memory of the backward
    # pass.
    step = jax.checkpoint(lambda memory, part: _chunk(memory, part, normaliser))
    memory, h = lax.scan(step, memory, parts)
    h = jnp.moveaxis(h, 0, 2)
    return h.reshape(*h.shape[:2], count * chunk, -1)[:, :, :t], memory


def _chunk(memory, part, normaliser):
    """Return the memory after a chunk and the outputs of its queries.

    `decay` is the sum of log_f since the chunk's beginning. It is subtracted from each token's log_i, since only
    differences of decays count. `top` is the largest exponent so far; it only scales, so no gradient flows through it.
    """
    q, k, v, log_i, log_f = part
    c, z, m = memory
    d, size = q.shape[-1], q.shape[2]
    decay = jnp.cumsum(log_f, -1)
    written = log_i - decay
    top = jnp.maximum(m[..., None], lax.cummax(written, axis=2))
    top = lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    before = jnp.exp(m[..., None] - top)
    seen = jnp.tri(size, dtype=bool)
    w = jnp.exp(jnp.where(seen, written[..., None, :] - top[..., None], -jnp.inf))
    exact = {"precision": lax.Precision.HIGHEST, "preferred_element_type": q.dtype}
    products = w * jnp.einsum("bktd,bkjd->bktj", q, k, **exact)
    above = jnp.einsum("bktj,bkje->bkte", products, v, **exact)
    above += before[..., None] * jnp.einsum("bktd,bkde->bkte", q, c, **exact)
    below = products.sum(-1) + before * jnp.einsum("bktd,bkd->bkt", q, z, **exact)
    if normaliser == "plain":
        h = above / (below + EPSILON)[..., None]
    else:
        floor = jnp.exp(-jnp.maximum(decay + top, -80))  # beyond that the quotient is 0
        h = above * d**-0.5 / (jnp.maximum(jnp.abs(below) * d**-0.5, floor) + EPSILON)[..., None]
    last, kept = w[..., -1, :], before[..., -1]
    c = kept[..., None, None] * c + jnp.einsum("bkjd,bkje->bkde", last[..., None] * k, v, **exact)
    z = kept[..., None] * z + jnp.einsum("bkj,bkjd->bkd", last, k, **exact)
    none = jnp.isneginf(m) & jnp.isneginf(written).all(-1)
    return type(memory)(c, z, jnp.where(none, -jnp.inf, decay[..., -1] + top[..., -1])), h
