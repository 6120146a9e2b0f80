"""The definition of `paged_decode`, for tests: a dense softmax over all pages, in float32, or in float64 if given."""

import jax
import jax.numpy as jnp

from pallas_kernels.int8_entries import dequantised_entries
from pallas_kernels.paged_decode.append import as_stored
from pallas_kernels.softmax import MASKED


def reference(
    q, pool, page_table, length, ring_length, ring_pages, new, bias, scale, dtype, append=None, pages=None
):
    b, n, t, h = q.shape
    _, heads, columns = page_table.shape
    page = pool.shape[1]
    exact = jnp.promote_types(q.dtype, jnp.float32)
    ids = jnp.clip(page_table, 0, pool.shape[0] - 1)
    entries = pool[ids] if scale is None else dequantised_entries(pool[ids], scale[ids], exact)
    entries = entries.reshape(b, heads, columns * page, 2 * h)
    place = jnp.arange(columns * page)
    ring = place < ring_pages * page
    in_ring = place < (jnp.zeros(b, int) if ring_length is None else ring_length)[:, None, None]
    in_global = place - ring_pages * page < length[..., None]
    if pages is not None:
        in_global &= jnp.repeat(jnp.pad(pages, ((0, 0), (0, 0), (ring_pages, 0))), page, -1)
    stored = jnp.where(ring, in_ring, in_global)
    k, v = jnp.split(jnp.where(stored[..., None], entries, 0).astype(exact), 2, -1)
    visible = jnp.broadcast_to(stored[:, :, None], (b, heads, t, columns * page))
    if new is not None:
        k, v = (jnp.concatenate([a, x.astype(exact)], 2) for a, x in zip((k, v), new, strict=True))
        causal = jnp.broadcast_to(jnp.tri(t, dtype=bool), (b, heads, t, t))
        visible = jnp.concatenate([visible, causal], -1)
    x = (
        jnp.einsum(
            "bkgth,bksh->bkgts", q.reshape(b, heads, n // heads, t, h).astype(exact), k, precision="highest"
        )
        / h**0.5
    )
    if bias is not None:
        biased = jnp.where(stored & ~ring, bias[ids].reshape(stored.shape), 0)
        biased = jnp.where(biased > MASKED / 2, biased, -jnp.inf)
        x += jnp.pad(biased, ((0, 0), (0, 0), (0, x.shape[-1] - columns * page)))[:, :, None, None]
    x = jnp.where(visible[:, :, None], x, -jnp.inf)
    lse = jax.nn.logsumexp(x, -1)
    p = jnp.exp(x - jnp.where(jnp.isfinite(lse), lse, 0)[..., None])
    o = jnp.einsum("bkgts,bksh->bkgth", p, v, precision="highest")
    return o.reshape(b, n, t, h).astype(dtype), lse.reshape(b, n, t), _written(pool, append, new)


def _written(pool, append, new):
    if append is None:
        return pool
    entries, token = pool.reshape(-1, pool.shape[2]), as_stored(new, pool)
    old = entries.at[append.slot].get(mode="clip")
    entries = entries.at[append.moved].set(old, mode="drop")
    return entries.at[append.slot].set(token, mode="drop").reshape(pool.shape)
