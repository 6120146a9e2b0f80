"""The gradient of `vertical_slash` on a GPU, in Triton: FlashAttention's recomputation (Dao et al., 2022).

Probabilities are recomputed from the log-sum-exp. `dq` walks like the forward pass. For `dk`, `dv` and the gate's
gradient a program takes a tile of keys, in place, and all query heads of the group, since the queries that see a key
are contiguous.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.interpret import gpu_interpret
from pallas_kernels.softmax import LOG2E, MASKED, dot
from pallas_kernels.varying import output
from pallas_kernels.vertical_slash import key_lists
from pallas_kernels.vertical_slash.gpu_walk import Blocks, Walk, blocks_of, load_rows, store_rows

BACKWARD = {
    "bfloat16": {64: Blocks(64, 64, 4), 128: Blocks(64, 64, 4), 256: Blocks(64, 32, 8)},
    "float32": {64: Blocks(32, 32, 4), 128: Blocks(32, 32, 8), 256: Blocks(16, 32, 8)},
}
"""The tiles of the backward pass, in the form of `FORWARD`. Registers hold two more products."""


def gpu_backward(q, k, v, end, log_gate, window, o, lse, do, dlse, *, interpret=None):
    """Return the gradients of q, k, v and log_gate, given the forward pass's results and their cotangents."""
    b, n, t, h = q.shape
    heads, s = k.shape[1:3]
    # The gradient of lse adds p·dlse to every logit's gradient p·(dp − delta), so dlse is part of delta.
    delta = jnp.sum(o.astype(jnp.float32) * do.astype(jnp.float32), -1) - dlse
    # An infinite log-sum-exp makes p = 0 for queries that saw nothing.
    lse = jnp.where(jnp.isneginf(lse), jnp.inf, lse) * LOG2E
    queries = [x.reshape(b * n, *x.shape[2:]) for x in (q, do, lse, delta)]
    keys = key_lists.zero_unseen_by_row(k, v, end, log_gate)
    band, far = key_lists.gathered(*keys, window=window)
    walk = Walk(far, band, blocks_of(BACKWARD, t, h, k.dtype), s - t, window)
    dq = _gradient_of_queries(walk, queries, n // heads, interpret)
    walk = walk._replace(far=key_lists.in_place(*keys, window=window)[1])
    dk, dv, *dgate = _gradient_of_keys(walk, queries, n // heads, interpret)
    return (
        dq.reshape(q.shape),
        dk.reshape(k.shape),
        dv.reshape(v.shape),
        dgate[0].reshape(b, heads, s) if dgate else None,
    )


def _gradient_of_queries(walk, queries, group, interpret):
    x, t, _ = queries[0].shape
    arrays, specs = walk.operands(t, group)
    head_specs = [
        pl.BlockSpec((None, *a.shape[1:]), lambda x, i, rest=a.ndim - 1: (x, *[0] * rest)) for a in queries
    ]
    return pl.pallas_call(
        functools.partial(_queries_kernel, walk),
        grid=(x, pl.cdiv(t, walk.blocks.queries)),
        in_specs=specs + head_specs,
        out_specs=head_specs[0],
        out_shape=output(queries[0].shape, queries[0].dtype, queries[0]),
        compiler_params=plt.CompilerParams(num_warps=walk.blocks.warps, num_stages=2),
        name="vertical_slash_dq",
        interpret=gpu_interpret(interpret),
    )(*arrays, *queries)


def _queries_kernel(walk, *refs):
    operands, (*query_refs, dq_ref) = walk.split(refs)
    bq = walk.blocks.queries
    start = pl.program_id(1) * bq
    q, do, lse, delta = (load_rows(ref, start, bq) for ref in query_refs)
    scale = dq_ref.shape[1] ** -0.5

    def step(k, v, mask, dq):
        p = jnp.exp2(mask(dot(q, k, (1, 1)) * (scale * LOG2E)) - lse[:, None])
        dx = p * (dot(do, v, (1, 1)) - delta[:, None])
        return dq + dot(dx.astype(k.dtype), k)

    store_rows(dq_ref, start, scale * walk.run(operands, step, jnp.zeros(q.shape, jnp.float32)))


def _gradient_of_keys(walk, queries, group, interpret):
    _, bk, warps = walk.blocks
    t = queries[0].shape[1]
    keys = walk.far
    r, s, _ = keys.k.shape
    gated = keys.log_gate is not None
    # The far list's start is the key's index or, with gates, the first index beyond the window.
    entries = [keys.k, keys.v, keys.start - walk.window if gated else keys.start, *keys[3:]][: 4 + gated]
    queries = [x.reshape(r, group * t, *x.shape[2:]) for x in queries]
    row = lambda x: pl.BlockSpec((None, *x.shape[1:]), lambda r, j: (r, *(0 for _ in x.shape[1:])))  # noqa: E731
    outputs = [output(keys.k.shape, keys.k.dtype, keys.k), output(keys.v.shape, keys.v.dtype, keys.k)]
    outputs += [output((r, s), jnp.float32, keys.k)] * gated
    blocks = _blocks_of_tiles(walk, t)
    return pl.pallas_call(
        functools.partial(_keys_kernel, walk, group, t),
        grid=(r, pl.cdiv(s, bk)),
        in_specs=[
            pl.BlockSpec((None, None, 4), lambda r, j: (r, j, 0)),
            *(row(x) for x in (*entries, *queries)),
        ],
        out_specs=[row(x) for x in outputs],
        out_shape=outputs,
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=2),
        name="vertical_slash_dkv",
        interpret=gpu_interpret(interpret),
    )(blocks, *entries, *queries)


def _blocks_of_tiles(walk, t):
    """Return four indices of blocks of queries for each tile of keys, `[r j 4]`.

    They are the first block that sees any of the tile, the first and the end of the blocks that see all of it, and the
    end of the blocks that see any of it.
    """
    bq, bk, _ = walk.blocks
    n = pl.cdiv(t, bq)
    ready, full_until, gone = (x - walk.first for x in key_lists.tiles(key_lists.pad(walk.far, bk), bk))
    begin = jnp.broadcast_to(bk * jnp.arange(ready.shape[1]) - walk.first, ready.shape)
    stop = -(-gone // bq)
    full = jnp.minimum(-(-jnp.minimum(ready, t) // bq), stop), full_until // bq
    begin, full_begin, full_stop, stop = (jnp.clip(x, 0, n) for x in (begin // bq, *full, stop))
    full_begin = jnp.maximum(full_begin, begin)
    return jnp.stack([begin, full_begin, jnp.clip(full_stop, full_begin, stop), stop], -1).astype(jnp.int32)


def _keys_kernel(walk, group, t, span, *refs):
    bq, bk, _ = walk.blocks
    gated = walk.far.log_gate is not None
    key_refs, refs = refs[: 4 + gated], refs[4 + gated :]
    query_refs, (dk_ref, dv_ref, *dgate_ref) = refs[:4], refs[4:]
    place = pl.program_id(1) * bk
    k, v, start, stop, *gate = (load_rows(ref, place, bk) for ref in key_refs)
    scale = dk_ref.shape[1] ** -0.5

    def tile(head, masked, i, state):
        # Beyond the last query all of these are 0, and so are their gradients.
        q, do, lse, delta = (load_rows(ref, i * bq, bq, head * t, t) for ref in query_refs)
        dk, dv, *dgate = state
        x = dot(k, q, (1, 1)) * (scale * LOG2E)
        index = walk.first + i * bq + jnp.arange(bq)[None]
        beyond = index >= start[:, None] + walk.window
        if gated:
            x += jnp.where(beyond, gate[0][:, None] * LOG2E, 0)
        if masked:
            x = jnp.where((index >= start[:, None]) & (index < stop[:, None]), x, MASKED)
        p = jnp.exp2(x - lse[None])
        dx = p * (dot(v, do, (1, 1)) - delta[None])
        dk += dot(dx.astype(q.dtype), q)
        dv += dot(p.astype(do.dtype), do)
        return dk, dv, *(d + jnp.where(beyond, dx, 0).sum(1) for d in dgate)

    def of_head(head, state):
        for at, masked in enumerate((True, False, True)):
            state = lax.fori_loop(span[at], span[at + 1], functools.partial(tile, head, masked), state)
        return state

    zeros = jnp.zeros(k.shape, jnp.float32)
    state = zeros, zeros, *[jnp.zeros(bk, jnp.float32)] * gated
    dk, dv, *dgate = lax.fori_loop(0, group, of_head, state)
    store_rows(dk_ref, place, scale * dk)
    store_rows(dv_ref, place, dv)
    if gated:
        store_rows(dgate_ref[0], place, dgate[0])
