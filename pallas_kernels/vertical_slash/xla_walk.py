"""A walk over every tile of keys up to the diagonal, in XLA: causal attention with or without gates, and the gradient.

As in FlashAttention (Dao et al., 2022), only o and the log-sum-exp are kept, and the backward pass recomputes each
tile's probabilities.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import softmax
from pallas_kernels.blocks import Blocks
from pallas_kernels.vertical_slash.key_lists import zero_unseen


class _Walk(Blocks):
    """Blocks of queries, each with the tiles of keys up to its diagonal."""

    def __init__(self, q, k, end, log_gate, window):
        super().__init__(q, k)
        self.k, self.end, self.log_gate, self.window = k, end, log_gate, window

    def tiles_seen(self, i):
        last = jnp.minimum((i + 1) * self.bq, self.t) + self.s - self.t - 1
        return last // self.bk + 1

    def logits(self, q_block, group, i, j):
        """Return the logits, with the gate beyond the window, and MASKED if the query does not see the key."""
        x = softmax.logits(q_block, self.keys(self.k, group, j))
        query, key = self.query_index[i][:, None], self.key_index[j]
        if self.log_gate is not None:
            gate = jnp.maximum(self.keys(self.log_gate, group, j), softmax.MASKED)
            x += jnp.where(self.beyond(i, j), gate[:, :, None], 0)
        seen = query >= key
        if self.end is not None:
            seen &= query < self.keys(self.end, group, j)[:, :, None]
        return jnp.where(seen, x, softmax.MASKED)

    def beyond(self, i, j):
        return self.query_index[i][:, None] >= self.key_index[j] + self.window

    def if_seen(self, group, i, j, step, carry):
        """Return `step(carry)`, or `carry` if every key of the tile has ended."""
        if self.end is None:
            return step(carry)
        gone = self.keys(self.end, group, j).max()
        return lax.cond(gone > self.query_index[i].min(), step, lambda carry: carry, carry)


def causal(q, k, v, log_gate, window, dtype):
    """Compute plain causal attention: o `[b k g t h]` of `dtype` and lse `[b k g t]`.

    q is `[b k g t h]`, k and v are `[b k s h]`, log_gate is `[b k s]` in float32 or None.
    """
    walk = _Walk(q, k, None, log_gate, window)

    def block(group, i, out):
        q_block = walk.queries(q, group, i)

        def tile(j, state):
            return softmax.update(state, walk.logits(q_block, group, i, j), walk.keys(v, group, j))

        o, lse = softmax.finish(lax.fori_loop(0, walk.tiles_seen(i), tile, softmax.start(q_block)))
        return walk.set_queries(out[0], group, i, o), walk.set_queries(out[1], group, i, lse)

    return walk.loop(block, (jnp.zeros_like(q, dtype), jnp.zeros_like(q[..., 0], jnp.float32)))


def xla_backward(q, k, v, end, log_gate, window, o, lse, do, dlse):
    """Return the gradients of q, k, v and log_gate, given the forward pass's results and their cotangents."""
    shape = q.shape
    b, heads = k.shape[:2]
    q, o, lse, do, dlse = (x.reshape(b, heads, -1, *x.shape[2:]) for x in (q, o, lse, do, dlse))
    if end is not None:
        k, v = zero_unseen(k, end), zero_unseen(v, end)
    walk = _Walk(q, k, end, log_gate, window)
    scale = shape[-1] ** -0.5
    # The gradient of lse adds p·dlse to every logit's gradient p·(dp − delta), so dlse is part of delta.
    delta = softmax.product("bkgth,bkgth->bkgt", o, do) - dlse

    def block(group, i, grads):
        q_block, do_block, delta_block, lse_block = (walk.queries(x, group, i) for x in (q, do, delta, lse))
        # An infinite log-sum-exp makes p = 0 for queries that saw nothing and for those that the block before contains,
        # too.
        lse_block = jnp.where(walk.query_owned[i] & ~jnp.isneginf(lse_block), lse_block, jnp.inf)

        def step(j, carry):
            dq, dk, dv, dg = carry
            p = jnp.exp(walk.logits(q_block, group, i, j) - lse_block[..., None])
            dp = softmax.product("bkqh,bksh->bkqs", do_block, walk.keys(v, group, j))
            dx = p * (dp - delta_block[..., None])
            if dg is not None:
                dg = walk.add_keys(dg, group, j, jnp.where(walk.beyond(i, j), dx, 0).sum(2))
            dx = (dx * scale).astype(q.dtype)
            dq += softmax.product("bkqs,bksh->bkqh", dx, walk.keys(k, group, j))
            dk = walk.add_keys(dk, group, j, softmax.product("bkqs,bkqh->bksh", dx, q_block))
            dv = walk.add_keys(dv, group, j, softmax.product("bkqs,bkqh->bksh", p.astype(do.dtype), do_block))
            return dq, dk, dv, dg

        def tile(j, carry):
            return walk.if_seen(group, i, j, functools.partial(step, j), carry)

        dq, *rest = grads
        dq_block, *rest = lax.fori_loop(0, walk.tiles_seen(i), tile, (walk.queries(dq, group, i), *rest))
        return walk.set_queries(dq, group, i, dq_block), *rest

    zeros = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), (q, k, v, log_gate))
    dq, dk, dv, dg = walk.loop(block, zeros)
    return dq.reshape(shape).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dg
