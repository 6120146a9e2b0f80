"""The definition of `mlstm`, for tests: the weights of all pairs at once, in float32, or in float64 if given."""

import jax.numpy as jnp


def reference(q, k, v, log_i, log_f, memory, normaliser, chunk):
    t, d = q.shape[2:]
    decay = jnp.cumsum(log_f, -1)
    log_w = decay[..., :, None] - decay[..., None, :] + log_i[..., None, :]
    log_w = jnp.where(jnp.arange(t)[:, None] >= jnp.arange(t), log_w, -jnp.inf)
    before = decay + memory.m[..., None]
    m = jnp.maximum(before, log_w.max(-1))
    safe = jnp.where(jnp.isfinite(m), m, 0)
    w, before = jnp.exp(log_w - safe[..., None]), jnp.exp(before - safe)
    products = w * jnp.einsum("bktd,bkjd->bktj", q, k, precision="highest")
    above = jnp.einsum("bktj,bkje->bkte", products, v, precision="highest")
    above += before[..., None] * jnp.einsum("bktd,bkde->bkte", q, memory.c, precision="highest")
    below = products.sum(-1) + before * jnp.einsum("bktd,bkd->bkt", q, memory.z, precision="highest")
    if normaliser == "plain":
        h = above / (below + 1e-6)[..., None]
    else:
        floor = jnp.exp(-safe)
        h = above / d**0.5 / (jnp.maximum(jnp.abs(below) / d**0.5, floor) + 1e-6)[..., None]
    last = w[..., -1, :]
    c = before[..., -1, None, None] * memory.c + jnp.einsum(
        "bkj,bkjd,bkje->bkde", last, k, v, precision="highest"
    )
    z = before[..., -1, None] * memory.z + jnp.einsum("bkj,bkjd->bkd", last, k, precision="highest")
    return h, type(memory)(c, z, m[..., -1])
