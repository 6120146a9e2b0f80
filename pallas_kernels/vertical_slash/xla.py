"""`vertical_slash` in XLA: compacts, does not mask. What a CPU runs, and today every accelerator.

A block of queries walks the local band of the original keys, then the visible prefix of the head's kept keys, which are
listed in order so that causality is a count. Nothing of size t × s exists, and the loops' work is what is visible.
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels import softmax
from pallas_kernels.blocks import divisor, even
from pallas_kernels.varying import alike
from pallas_kernels.vertical_slash.causal import causal

QUERIES = 256
KEYS = 512
ELEMENTS = 1 << 19


def xla(q, k, v, end, log_gate, window):
    b, n, t, h = q.shape
    heads, s = k.shape[1:3]
    q = q.reshape(b * heads, n // heads, t, h)
    k, v = k.reshape(-1, s, h), v.reshape(-1, s, h)
    log_gate = None if log_gate is None else log_gate.reshape(-1, s)
    if end is None:
        o, lse = causal(window, q, k, v, log_gate)
    else:
        o, lse = _sparse(q, k, v, end.reshape(-1, s), log_gate, window)
    return o.reshape(b, n, t, h), lse.reshape(b, n, t)


def _kept(far, size):
    """The indices of the True entries of `far` `[r s]` in order, padded with `s` to `[r size]`, and their running count."""
    r, s = far.shape
    count = jnp.cumsum(far, -1, dtype=jnp.int32)
    slot = jnp.where(far, count - 1, size)
    index = jnp.full((r, size), s, jnp.int32)
    position = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32), far.shape)
    return index.at[jnp.arange(r)[:, None], slot].set(position, mode="drop"), count


def _sparse(q, k, v, end, log_gate, window):
    r, g, t, h = q.shape
    s = k.shape[1]
    blocks, bq = even(t, QUERIES)
    band = min(s, bq + window - 1)
    tiles, bk = even(s, KEYS)
    br = divisor(r, ELEMENTS // (g * bq * max(bk, band)))
    far = end > jnp.arange(s) + window
    index, count = _kept(far, tiles * bk)

    def block(x, out):
        row, first = x // blocks * br, jnp.minimum(x % blocks * bq, t - bq)
        tile = lax.dynamic_slice(q, (row, 0, first, 0), (br, g, bq, h)).reshape(br, g * bq, h)
        first_index = first + s - t
        i = jnp.tile(first_index + jnp.arange(bq), g)[:, None]

        def rows(array, start, size):
            return lax.dynamic_slice(
                array, (row, start, *(0 for _ in array.shape[2:])), (br, size, *array.shape[2:])
            )

        start = jnp.maximum(first_index + bq - band, 0)
        key = start + jnp.arange(band)
        alive = rows(end, start, band) > key
        x_band = softmax.logits(tile, rows(k, start, band))
        x_band = jnp.where((i >= key) & (i - key < window) & alive[:, None], x_band, softmax.MASKED)
        v_band = jnp.where(alive[..., None], rows(v, start, band), 0)
        state, _ = alike(softmax.start(*tile.shape), x_band)
        state = softmax.update(state, x_band, v_band)

        def kept(j, state):
            key = rows(index, j * bk, bk)
            at = (row + jnp.arange(br)[:, None], key)
            x_kept = softmax.logits(tile, k.at[at].get(mode="fill", fill_value=0))
            if log_gate is not None:
                gate = log_gate.at[at].get(mode="fill", fill_value=0)
                x_kept += jnp.maximum(gate, softmax.MASKED)[:, None]
            last = end.at[at].get(mode="fill", fill_value=0)
            visible = (i - key[:, None] >= window) & (i < last[:, None])
            return softmax.update(
                state, jnp.where(visible, x_kept, softmax.MASKED), v.at[at].get(mode="fill", fill_value=0)
            )

        reach = first_index + bq - 1 - window
        visible = jnp.where(reach >= 0, rows(count, jnp.maximum(reach, 0), 1).max(), 0)
        o, lse = softmax.finish(lax.fori_loop(0, (visible + bk - 1) // bk, kept, state))
        o = o.reshape(br, g, bq, h).astype(q.dtype)
        return (
            lax.dynamic_update_slice(out[0], o, (row, 0, first, 0)),
            lax.dynamic_update_slice(out[1], lse.reshape(br, g, bq), (row, 0, first)),
        )

    out, _ = alike((jnp.zeros_like(q), jnp.zeros(q.shape[:3])), (q, k, v, end, log_gate))
    return lax.fori_loop(0, r // br * blocks, block, out)
