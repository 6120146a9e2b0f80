"""`vertical_slash` in XLA, which compacts keys instead of masking them. The default on a CPU.

A block of queries walks over the local band of the original keys, then over the visible prefix of the head's kept keys.
These are gathered in order, so that causality is a count. No array of size t × s exists, and the work is proportional
to the number of visible pairs.
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels import softmax
from pallas_kernels.blocks import Blocks, even
from pallas_kernels.vertical_slash.key_lists import compact
from pallas_kernels.vertical_slash.xla_walk import causal


def xla(q, k, v, end, log_gate, window, dtype):
    b, n, t, h = q.shape
    heads = k.shape[1]
    q = q.reshape(b, heads, n // heads, t, h)
    if end is None:
        o, lse = causal(q, k, v, log_gate, window, dtype)
    else:
        o, lse = _sparse(q, k, v, end, log_gate, window, dtype)
    return o.reshape(b, n, t, h), lse.reshape(b, n, t)


def _sparse(q, k, v, end, log_gate, window, dtype):
    b, heads, _, t, _ = q.shape
    s = k.shape[2]
    walk = Blocks(q, k)
    bands, bw = even(min(s, walk.bq + window - 1), 2 * walk.bk)
    far = end > jnp.arange(s) + window
    count = jnp.cumsum(far, -1, dtype=jnp.int32)
    kept_index = compact(far, walk.tiles * walk.bk)

    def gather(x):
        at = (*jnp.ogrid[:b, :heads, :1][:2], kept_index)
        return x.at[at].get(mode="fill", fill_value=0)

    k_kept, v_kept, end_kept = gather(k), gather(v), gather(end)
    gate_kept = None if log_gate is None else jnp.maximum(gather(log_gate), softmax.MASKED)
    ended = lax.cummax(end_kept.reshape(b, heads, walk.tiles, walk.bk).max(-1), axis=2)
    start, stop = jnp.broadcast_to(jnp.arange(s), end.shape), jnp.minimum(end, jnp.arange(s) + window)

    def block(group, i, out):
        q_block, query = walk.queries(q, group, i), walk.query_index[i]
        last = jnp.minimum((i + 1) * walk.bq, t) + s - t - 1

        def band(j, state):
            """Return the state after the `bw` keys before `to`, or the first `bw` keys."""
            to = last + 1 - j * bw
            k_tile, v_tile, key, until = (
                walk.slice_keys(x, group, jnp.maximum(to - bw, 0), bw) for x in (k, v, start, stop)
            )
            v_tile = jnp.where((until > key)[..., None], v_tile, 0)
            x = softmax.logits(q_block, k_tile)
            seen = (key[:, :, None] <= jnp.minimum(query, to - 1)[:, None]) & (
                query[:, None] < until[:, :, None]
            )
            return softmax.update(state, jnp.where(seen, x, softmax.MASKED), v_tile)

        def kept(j, state):
            x = softmax.logits(q_block, walk.keys(k_kept, group, j))
            if gate_kept is not None:
                x += walk.keys(gate_kept, group, j)[:, :, None]
            key, until = (walk.keys(a, group, j)[:, :, None] for a in (kept_index, end_kept))
            seen = (key <= (query - window)[:, None]) & (query[:, None] < until)
            return softmax.update(state, jnp.where(seen, x, softmax.MASKED), walk.keys(v_kept, group, j))

        reach = jnp.minimum(last + 1, walk.bq + window - 1)
        state = lax.fori_loop(0, jnp.minimum((reach + bw - 1) // bw, bands), band, softmax.start(q_block))
        visible = walk.slice_keys(count, group, jnp.maximum(last - window, 0), 1).max()
        visible = jnp.where(last >= window, visible, 0)
        # The first tiles may have ended for every query, as those of earlier documents in a packed sequence have.
        past = jnp.all(walk.slice_keys(ended, group, 0, walk.tiles) <= query.min(), (0, 1)).sum()
        state = lax.fori_loop(past, (visible + walk.bk - 1) // walk.bk, kept, state)
        o, lse = softmax.finish(state)
        return walk.set_queries(out[0], group, i, o), walk.set_queries(out[1], group, i, lse)

    return walk.loop(block, (jnp.zeros_like(q, dtype), jnp.zeros_like(q[..., 0], jnp.float32)))
