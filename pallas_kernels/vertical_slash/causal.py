"""Blockwise causal attention with WG-KV's log-gate, and its gradient: what training runs where there is no kernel.

FlashAttention's recomputation (Dao et al., 2022): only o and the log-sum-exp are kept, and the backward pass makes each
tile's probabilities again. Loops go over (group of rows, query block) and, inside, over the key tiles up to the
diagonal; a row is one (sequence, kv head), and its `g` query heads are stacked in a tile's rows.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import softmax
from pallas_kernels.blocks import divisor, even
from pallas_kernels.varying import alike

QUERIES = 128
KEYS = 128
ELEMENTS = 1 << 17
"""Largest block of queries, tile of keys, and number of logits at once (512 KB of them stays in a core's cache)."""


class Walk:
    """The loops' geometry for q `[r g t h]` and k `[r s h]`: block x holds rows[x] and queries[x]."""

    def __init__(self, q, k):
        self.r, self.g, self.t, self.h = q.shape
        self.s = k.shape[1]
        self.blocks, self.bq = even(self.t, QUERIES)
        _, self.bk = even(self.s, KEYS)
        self.br = divisor(self.r, ELEMENTS // (self.g * self.bq * self.bk))
        self.steps = self.r // self.br * self.blocks

    def corner(self, x):
        """The first row and the first query of block `x`; the last block of queries overlaps the one before."""
        return x // self.blocks * self.br, jnp.minimum(x % self.blocks * self.bq, self.t - self.bq)

    def queries(self, array, x):
        """Block `x` of an array `[r g t …]`, with g and t stacked."""
        row, query = self.corner(x)
        rest = array.shape[3:]
        tile = lax.dynamic_slice(array, (row, 0, query, *(0 for _ in rest)), (self.br, self.g, self.bq, *rest))
        return tile.reshape(self.br, self.g * self.bq, *rest)

    def put(self, array, x, tile):
        row, query = self.corner(x)
        rest = array.shape[3:]
        tile = tile.reshape(self.br, self.g, self.bq, *rest).astype(array.dtype)
        return lax.dynamic_update_slice(array, tile, (row, 0, query, *(0 for _ in rest)))

    def index(self, x, *, once=False):
        """The queries' indices `[g·bq]`; with `once` those that an earlier block also holds are -1: they see nothing."""
        _, query = self.corner(x)
        i = query + jnp.arange(self.bq)
        if once:
            i = jnp.where(i >= x % self.blocks * self.bq, i, -1 - self.s)
        return jnp.tile(i + self.s - self.t, self.g)

    def tiles(self, x):
        """How many key tiles reach the diagonal."""
        _, query = self.corner(x)
        return (query + self.bq + self.s - self.t + self.bk - 1) // self.bk

    def keys(self, array, x, j):
        """Tile `j` of an array `[r s …]`."""
        row, _ = self.corner(x)
        rest = array.shape[2:]
        start = jnp.minimum(j * self.bk, self.s - self.bk)
        return lax.dynamic_slice(array, (row, start, *(0 for _ in rest)), (self.br, self.bk, *rest))

    def add_keys(self, array, x, j, tile):
        row, _ = self.corner(x)
        rest = array.shape[2:]
        start = jnp.minimum(j * self.bk, self.s - self.bk)
        return lax.dynamic_update_slice(
            array, self.keys(array, x, j) + tile, (row, start, *(0 for _ in rest))
        )

    def key_index(self, j):
        """The keys' indices `[bk]`; those that an earlier tile also holds come after every query."""
        start = jnp.minimum(j * self.bk, self.s - self.bk)
        i = start + jnp.arange(self.bk)
        return jnp.where(i >= j * self.bk, i, self.s)


def _logits(walk, q, k, log_gate, x, j, i, window):
    key = walk.key_index(j)
    logits = softmax.logits(q, walk.keys(k, x, j))
    if log_gate is not None:
        gate = jnp.maximum(walk.keys(log_gate, x, j), softmax.MASKED)[:, None]
        logits += jnp.where(i[:, None] - key >= window, gate, 0)
    return jnp.where(i[:, None] >= key, logits, softmax.MASKED)


def _forward(window, q, k, v, log_gate):
    walk = Walk(q, k)

    def block(x, out):
        tile, i = walk.queries(q, x), walk.index(x)

        def keys(j, state):
            return softmax.update(
                state, _logits(walk, tile, k, log_gate, x, j, i, window), walk.keys(v, x, j)
            )

        state = softmax.start(*tile.shape)
        state, _ = alike(state, (q, k, v, log_gate))
        o, lse = softmax.finish(lax.fori_loop(0, walk.tiles(x), keys, state))
        return walk.put(out[0], x, o), walk.put(out[1], x, lse)

    out, _ = alike((jnp.zeros_like(q), jnp.zeros(q.shape[:3])), (q, k, v, log_gate))
    return lax.fori_loop(0, walk.steps, block, out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def causal(window, q, k, v, log_gate):
    """q `[r g t h]`, k and v `[r s h]`, log_gate `[r s]` or None -> o `[r g t h]`, lse `[r g t]`."""
    return _forward(window, q, k, v, log_gate)


def _save(window, q, k, v, log_gate):
    o, lse = _forward(window, q, k, v, log_gate)
    return (o, lse), (q, k, v, log_gate, o, lse)


def _backward(window, saved, cotangents):
    q, k, v, log_gate, o, lse = saved
    do, dlse = cotangents
    walk = Walk(q, k)
    scale = q.shape[-1] ** -0.5
    # d lse adds p·dlse to every logit's gradient p·(dp − delta), so it joins delta.
    delta = jnp.sum(o.astype(jnp.float32) * do.astype(jnp.float32), -1) - dlse
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    def block(x, grads):
        tile, i = walk.queries(q, x), walk.index(x, once=True)
        do_tile, lse_tile, delta_tile = (walk.queries(a, x) for a in (do, lse, delta))

        def keys(j, carry):
            dq, dk, dv, dg = carry
            p = jnp.exp(_logits(walk, tile, k, log_gate, x, j, i, window) - lse_tile[..., None])
            dp = dot("rqh,rsh->rqs", do_tile, walk.keys(v, x, j))
            dx = p * (dp - delta_tile[..., None])
            if log_gate is not None:
                beyond = i[:, None] - walk.key_index(j) >= window
                dg = walk.add_keys(dg, x, j, jnp.where(beyond, dx, 0).sum(1))
            dx = (dx * scale).astype(q.dtype)
            dq += dot("rqs,rsh->rqh", dx, walk.keys(k, x, j))
            dk = walk.add_keys(dk, x, j, dot("rqs,rqh->rsh", dx, tile))
            dv = walk.add_keys(dv, x, j, dot("rqs,rqh->rsh", p.astype(do.dtype), do_tile))
            return dq, dk, dv, dg

        dq, *rest = grads
        dq_tile, _ = alike(jnp.zeros(tile.shape), dq)
        dq_tile, *rest = lax.fori_loop(0, walk.tiles(x), keys, (dq_tile, *rest))
        # The rows of `once` that another block owns are zero here, so blocks add up.
        return walk.put(dq, x, dq_tile + walk.queries(dq, x)), *rest

    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape), (q, k, v, log_gate))
    zeros, _ = alike(zeros, (saved, cotangents))
    dq, dk, dv, dg = lax.fori_loop(0, walk.steps, block, zeros)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dg


causal.defvjp(_save, _backward)
