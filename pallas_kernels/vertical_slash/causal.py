"""Blockwise causal attention with WG-KV's log-gate, and its gradient: what training runs where there is no kernel.

FlashAttention's recomputation (Dao et al., 2022): only o and the log-sum-exp are kept, and the backward pass makes each
tile's probabilities again. A row is one (sequence, kv head), and its `g` query heads are stacked in a tile's queries.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import softmax
from pallas_kernels.blocks import divisor, even
from pallas_kernels.varying import alike

QUERIES = 64
KEYS = 64
LOGITS = 1 << 15
"""Largest block of queries, tile of keys, and number of logits at once: a core's cache holds them (128 KB)."""

SAVED = "vertical_slash"
"""The name of o and lse for `jax.checkpoint_policies.save_only_these_names`: rematerialisation that saves them need not
run the forward pass twice."""

_dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


class Walk:
    """The loops' geometry for q `[r g t h]` and k `[r s h]`: groups of rows, blocks of queries, tiles of keys.

    Blocks are copied to be contiguous, since slices out of the middle keep XLA from vectorising what reads them.
    """

    def __init__(self, q, k):
        self.r, self.g, self.t, _ = q.shape
        self.s = k.shape[1]
        self.blocks, self.bq = even(self.t, QUERIES)
        self.tiles, self.bk = even(self.s, KEYS)
        self.br = divisor(self.r, LOGITS // (self.g * self.bq * self.bk))
        self.groups = self.r // self.br
        index = jnp.arange(self.blocks * self.bq) + self.s - self.t
        self.query_index = jnp.tile(index.reshape(self.blocks, self.bq), self.g)
        """`[block g·bq]`; padding comes after the last query."""
        self.key_index = jnp.arange(self.tiles * self.bk).reshape(self.tiles, self.bk)
        """`[tile bk]`; padding comes after the last key, so that no query sees it."""

    def queries(self, x):
        """`[r g t …]` -> `[group block br g·bq …]`, padded with zeros."""
        rest = x.shape[3:]
        x = jnp.pad(x, ((0, 0), (0, 0), (0, self.blocks * self.bq - self.t), *((0, 0) for _ in rest)))
        x = x.reshape(self.groups, self.br, self.g, self.blocks, self.bq, *rest)
        return jnp.moveaxis(x, 3, 1).reshape(self.groups, self.blocks, self.br, self.g * self.bq, *rest)

    def from_queries(self, x):
        rest = x.shape[4:]
        x = jnp.moveaxis(x.reshape(self.groups, self.blocks, self.br, self.g, self.bq, *rest), 1, 3)
        return x.reshape(self.r, self.g, self.blocks * self.bq, *rest)[:, :, : self.t]

    def keys(self, x):
        """`[r s …]` -> `[group tile br bk …]`, padded with zeros."""
        rest = x.shape[2:]
        x = jnp.pad(x, ((0, 0), (0, self.tiles * self.bk - self.s), *((0, 0) for _ in rest)))
        return jnp.moveaxis(x.reshape(self.groups, self.br, self.tiles, self.bk, *rest), 2, 1)

    def from_keys(self, x):
        return jnp.moveaxis(x, 1, 2).reshape(self.r, self.tiles * self.bk, *x.shape[4:])[:, : self.s]

    def tiles_seen(self, i):
        """How many tiles of keys block `i` of queries sees any of."""
        return jnp.minimum((i * self.bq + self.bq + self.s - self.t - 1) // self.bk + 1, self.tiles)

    def first_seer(self, j):
        """The first block of queries that sees any of tile `j` of keys."""
        return jnp.maximum(j * self.bk - (self.s - self.t), 0) // self.bq


def _mask(logits, gate, query, key, window):
    """Logits with the gate beyond the window, MASKED above the diagonal. The arguments broadcast."""
    if gate is not None:
        logits += jnp.where(query - key >= window, jnp.maximum(gate, softmax.MASKED), 0)
    return jnp.where(query >= key, logits, softmax.MASKED)


def _forward(window, q, k, v, log_gate):
    walk = Walk(q, k)
    q_blocks = walk.queries(q)
    k, v, log_gate = jax.tree.map(walk.keys, (k, v, log_gate))

    def block(row, i, out):
        tile, index = q_blocks[row, i], walk.query_index[i][:, None]

        def keys(j, state):
            gate = None if log_gate is None else log_gate[row, j][:, None]
            logits = _mask(softmax.logits(tile, k[row, j]), gate, index, walk.key_index[j], window)
            return softmax.update(state, logits, v[row, j])

        start, _ = alike(softmax.start(*tile.shape), tile)
        o, lse = softmax.finish(lax.fori_loop(0, walk.tiles_seen(i), keys, start))
        return out[0].at[row, i].set(o.astype(q.dtype)), out[1].at[row, i].set(lse)

    out, _ = alike((jnp.zeros_like(q_blocks), jnp.zeros(q_blocks.shape[:-1])), q)
    out = lax.fori_loop(
        0, walk.groups, lambda row, out: lax.fori_loop(0, walk.blocks, functools.partial(block, row), out), out
    )
    return jax.tree.map(walk.from_queries, out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def causal(window, q, k, v, log_gate):
    """q `[r g t h]`, k and v `[r s h]`, log_gate `[r s]` float32 or None -> o `[r g t h]`, lse `[r g t]` float32."""
    return _forward(window, q, k, v, log_gate)


def _save(window, q, k, v, log_gate):
    o, lse = jax.tree.map(lambda x: checkpoint_name(x, SAVED), _forward(window, q, k, v, log_gate))
    return (o, lse), (q, k, v, log_gate, o, lse)


def _backward(window, saved, cotangents):
    """Key-major, since the queries that see a key are contiguous. A tile is `[r s q]`: then only one of the five
    products contracts over its rows, which is slow on CPUs."""
    q, k, v, log_gate, o, lse = saved
    do, dlse = cotangents
    walk = Walk(q, k)
    scale = q.shape[-1] ** -0.5
    # d lse adds p·dlse to every logit's gradient p·(dp − delta), so it joins delta.
    delta = jnp.sum(o.astype(jnp.float32) * do.astype(jnp.float32), -1) - dlse
    q, do, lse, delta = map(walk.queries, (q, do, lse, delta))
    k, v, log_gate = jax.tree.map(walk.keys, (k, v, log_gate))

    def tile(row, j, grads):
        key = walk.key_index[j][:, None]
        gate = None if log_gate is None else log_gate[row, j][..., None]

        def queries(i, carry):
            dq, dk, dv, dg = carry
            index = walk.query_index[i]
            logits = _dot("rsh,rqh->rsq", k[row, j], q[row, i]) * scale
            p = jnp.exp(_mask(logits, gate, index, key, window) - lse[row, i][:, None])
            dx = p * (_dot("rsh,rqh->rsq", v[row, j], do[row, i]) - delta[row, i][:, None])
            if gate is not None:
                dg += jnp.where(index - key >= window, dx, 0).sum(-1)
            dx = (dx * scale).astype(q.dtype)
            dq = dq.at[row, i].add(_dot("rsq,rsh->rqh", dx, k[row, j]))
            dk += _dot("rsq,rqh->rsh", dx, q[row, i])
            dv += _dot("rsq,rqh->rsh", p.astype(do.dtype), do[row, i])
            return dq, dk, dv, dg

        dq, *sums = grads
        start = jax.tree.map(lambda a: jnp.zeros_like(a[row, j]), sums)
        dq, *tiles = lax.fori_loop(walk.first_seer(j), walk.blocks, queries, (dq, *start))
        return dq, *jax.tree.map(lambda a, x: a.at[row, j].set(x), sums, tiles)

    zeros, _ = alike(jax.tree.map(lambda a: jnp.zeros(a.shape), (q, k, v, log_gate)), (q, do))
    dq, dk, dv, dg = lax.fori_loop(
        0, walk.groups, lambda row, g: lax.fori_loop(0, walk.tiles, functools.partial(tile, row), g), zeros
    )
    dk, dv, dg = jax.tree.map(walk.from_keys, (dk, dv, dg))
    return walk.from_queries(dq).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dg


causal.defvjp(_save, _backward)
