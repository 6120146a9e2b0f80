"""The definition of `attention_mass`, for tests: all probabilities at once, in float32, or in float64 if given."""

import jax
import jax.numpy as jnp


def reference(q, k, valid, lse, query_factor, key_factor, over, group, offset):
    b, n, t, h = q.shape
    heads, s = k.shape[1:3]
    exact = jnp.promote_types(q.dtype, jnp.float32)
    counted = jnp.ones((b, heads, t, s), bool)
    if offset is not None:
        counted &= (jnp.arange(t) + s - t)[:, None] >= jnp.arange(s) + offset
    if valid is not None:
        counted &= valid[:, :, None]
        k = jnp.where(valid[..., None], k, 0)
    grouped = q.reshape(b, heads, n // heads, t, h)
    x = jnp.einsum("bkgth,bksh->bkgts", grouped.astype(exact), k.astype(exact), precision="highest") / h**0.5
    x = jnp.where(counted[:, :, None], x, -jnp.inf)
    lse = jax.nn.logsumexp(x, -1) if lse is None else lse.reshape(x.shape[:4])
    seen = jnp.isfinite(lse)[..., None]
    x = jnp.where(seen, x - jnp.where(seen, lse[..., None], 0), -jnp.inf)
    if query_factor is not None:
        x += jnp.log(query_factor.reshape(x.shape[:4]))[..., None]
    log = x.max(3) if over == "max" else jax.nn.logsumexp(x, 3)
    if key_factor is not None:
        log += jnp.log(key_factor.reshape(log.shape))
    log = {
        "max": log.max(2),
        "mean": jax.nn.logsumexp(log, 2) - jnp.log(n // heads),
        "sum": jax.nn.logsumexp(log, 2),
    }[group]
    return log if over == "logsumexp" else jnp.exp(log)
