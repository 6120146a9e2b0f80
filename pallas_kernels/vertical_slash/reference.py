"""The definition of `vertical_slash`, for tests: one dense softmax, in float32, or in float64 if given."""

import jax
import jax.numpy as jnp


def reference(q, k, v, end, log_gate, window, dtype):
    b, n, t, h = q.shape
    heads, s = k.shape[1:3]
    exact = jnp.promote_types(q.dtype, jnp.float32)
    index = (jnp.arange(t) + s - t)[:, None]
    key = jnp.arange(s)
    visible = jnp.broadcast_to(index >= key, (b, heads, t, s))
    if end is not None:
        visible &= index < end[:, :, None]
        v = jnp.where((end > key)[..., None], v, 0)
    grouped = q.reshape(b, heads, n // heads, t, h)
    x = jnp.einsum("bkgth,bksh->bkgts", grouped.astype(exact), k.astype(exact), precision="highest") / h**0.5
    if log_gate is not None:
        x += jnp.where(index - key >= window, log_gate[:, :, None], 0)[:, :, None]
    x = jnp.where(visible[:, :, None], x, -jnp.inf)
    lse = jax.nn.logsumexp(x, -1)
    p = jnp.exp(x - jnp.where(jnp.isfinite(lse), lse, 0)[..., None])
    o = jnp.einsum("bkgts,bksh->bkgth", p, v.astype(exact), precision="highest")
    return o.reshape(b, n, t, h).astype(dtype), lse.reshape(b, n, t)
