"""`vertical_slash` in XLA: compacts, does not mask. What a CPU runs, and today every accelerator.

A block of queries walks the local band of the original keys, then the visible prefix of the head's kept keys, which are
gathered in order so that causality is a count. Nothing of size t × s exists, and the work is what is visible.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels import softmax
from pallas_kernels.blocks import Blocks, even
from pallas_kernels.vertical_slash.causal import causal

NEVER = jnp.iinfo(jnp.int32).max // 2
"""The index of a key that no query sees; half the largest, so that adding a window does not overflow."""


def xla(q, k, v, end, log_gate, window):
    b, n, t, h = q.shape
    heads = k.shape[1]
    q = q.reshape(b, heads, n // heads, t, h)
    out: Any = causal(window, q, k, v, log_gate) if end is None else _sparse(q, k, v, end, log_gate, window)
    o, lse = out
    return o.reshape(b, n, t, h), lse.reshape(b, n, t)


def _compact(far, size):
    """The indices of the True entries of `far` `[b k s]`, in order and padded with `s` to `[b k size]`; and their
    running count `[b k s]`."""
    b, heads, s = far.shape
    count = jnp.cumsum(far, -1, dtype=jnp.int32)
    slot = jnp.where(far, count - 1, size)
    index = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32), far.shape)
    empty = jnp.full_like(far, s, jnp.int32, shape=(b, heads, size))
    return empty.at[(*jnp.ogrid[:b, :heads, :1][:2], slot)].set(index, mode="drop"), count


def _sparse(q, k, v, end, log_gate, window):
    b, heads, _, t, _ = q.shape
    s = k.shape[2]
    walk = Blocks(q, k)
    bands, bw = even(min(s, walk.bq + window - 1), 2 * walk.bk)
    kept_index, count = _compact(end > jnp.arange(s) + window, walk.tiles * walk.bk)

    def gather(x):
        at = (*jnp.ogrid[:b, :heads, :1][:2], kept_index)
        return x.at[at].get(mode="fill", fill_value=0)

    k_kept, v_kept, end_kept = gather(k), gather(v), gather(end)
    gate_kept = None if log_gate is None else jnp.maximum(gather(log_gate), softmax.MASKED)
    key_index = jnp.where(end > jnp.arange(s), jnp.arange(s), NEVER)

    def block(group, i, out):
        q_block, query = walk.queries(q, group, i), walk.query_index[i]
        last = jnp.minimum((i + 1) * walk.bq, t) + s - t - 1

        def band(j, state):
            """The `bw` keys before `stop`, or the first `bw`."""
            stop = last + 1 - j * bw
            k_tile, v_tile, key = (
                walk.slice_keys(x, group, jnp.maximum(stop - bw, 0), bw) for x in (k, v, key_index)
            )
            v_tile = jnp.where((key < NEVER)[..., None], v_tile, 0)
            seen = (key[:, :, None] <= jnp.minimum(query, stop - 1)[:, None]) & (
                key[:, :, None] > (query - window)[:, None]
            )
            return softmax.update(
                state, jnp.where(seen, softmax.logits(q_block, k_tile), softmax.MASKED), v_tile
            )

        def kept(j, state):
            x = softmax.logits(q_block, walk.keys(k_kept, group, j))
            if gate_kept is not None:
                x += walk.keys(gate_kept, group, j)[:, :, None]
            key, stop = (walk.keys(a, group, j)[:, :, None] for a in (kept_index, end_kept))
            seen = (key <= (query - window)[:, None]) & (query[:, None] < stop)
            return softmax.update(state, jnp.where(seen, x, softmax.MASKED), walk.keys(v_kept, group, j))

        reach = jnp.minimum(last + 1, walk.bq + window - 1)
        state = lax.fori_loop(0, jnp.minimum((reach + bw - 1) // bw, bands), band, softmax.start(q_block))
        left = walk.slice_keys(count, group, jnp.maximum(last - window, 0), 1).max()
        left = jnp.where(last >= window, left, 0)
        state = lax.fori_loop(0, (left + walk.bk - 1) // walk.bk, kept, state)
        o, lse = softmax.finish(state)
        return walk.set_queries(out[0], group, i, o), walk.set_queries(out[1], group, i, lse)

    return walk.loop(block, (jnp.zeros_like(q), jnp.zeros_like(q[..., 0], jnp.float32)))
