"""`vertical_slash` forward on a TPU. See `tpu_walk.py` for what is walked and `tpu_backward.py` for the gradient."""

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.interpret import tpu_interpret
from pallas_kernels.softmax import MASKED
from pallas_kernels.supported import require_attention
from pallas_kernels.varying import output
from pallas_kernels.vertical_slash import key_lists
from pallas_kernels.vertical_slash.tpu_gather import seen
from pallas_kernels.vertical_slash.tpu_walk import LANES, LN2, LOG2E, Walk, blocks_of, dot, lane_sums, wide
from pallas_kernels.vmem import vmem_limit


def tpu(q, k, v, end, log_gate, window, dtype, *, interpret=None):
    require_attention("vertical_slash", "tpu", q, k=k, v=v)
    t, s = q.shape[2], k.shape[2]
    blocks = blocks_of(q.shape[1] // k.shape[1], t, s, q.dtype)
    gather = functools.partial(seen, block=blocks.keys, interpret=interpret)
    band, far = key_lists.gathered(*key_lists.by_row(k, v, end, log_gate), window=window, gather=gather)
    return attend(q, band, far, dtype, blocks=blocks, first=s - t, window=window, interpret=interpret)


def attend(q, band, far, dtype, *, blocks=None, first=0, window=1, interpret=None):
    """Queries `[b n t h]`, of which the first has index `first`, over lists of keys -> o `[b n t h]` of `dtype`, lse
    `[b n t]`."""
    b, n, t, h = q.shape
    r = far.k.shape[0]
    group = b * n // r
    blocks = blocks or blocks_of(group, t, far.k.shape[1], q.dtype)
    q = q.reshape(r, group, t, h)
    walk = Walk(far, band, blocks, pl.cdiv(t, blocks.queries), first, window)
    arrays, specs = walk.operands()
    block = pl.BlockSpec((None, group, blocks.queries, h), lambda r, i: (r, 0, i, 0))
    rows = group * blocks.queries
    o, lse = pl.pallas_call(
        functools.partial(_kernel, walk),
        grid=(r, walk.n),
        in_specs=[*specs, block],
        out_specs=[block, pl.BlockSpec((None, group, blocks.queries), lambda r, i: (r, 0, i))],
        out_shape=[output(q.shape, dtype, q), output(q.shape[:3], jnp.float32, q)],
        scratch_shapes=[
            pltpu.VMEM((rows, LANES), jnp.float32),
            pltpu.VMEM((rows, LANES), jnp.float32),
            pltpu.VMEM((rows, h), jnp.float32),
            *walk.scratch(),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            disable_bounds_checks=True,
            vmem_limit_bytes=vmem_limit("vertical_slash", group, h, q.dtype.itemsize),
        ),
        name="vertical_slash",
        interpret=tpu_interpret(interpret),
    )(*arrays, q)
    return o.reshape(b, n, t, h), lse.reshape(b, n, t)


def _kernel(walk, *refs):
    operands, (q_ref, o_ref, lse_ref, m_ref, l_ref, acc_ref), scratch = walk.split(refs)
    group, bq, h = q_ref.shape
    scale = LOG2E / h**0.5
    m_ref[...] = jnp.full_like(m_ref, MASKED)
    l_ref[...] = jnp.zeros_like(l_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)

    def tile(k, v, mask):
        x = mask(dot(q_ref[...].reshape(group * bq, h), k, (1, 1)) * scale)
        m = m_ref[...]
        m_new = jnp.maximum(m, jnp.max(x, axis=1, keepdims=True))
        p = jnp.exp2(x - wide(m_new, x.shape[1]))
        kept = jnp.exp2(m - m_new)
        l_ref[...] = kept * l_ref[...] + lane_sums(p)
        m_ref[...] = m_new
        acc_ref[...] = acc_ref[...] * wide(kept, h) + dot(p.astype(v.dtype), v)

    walk.run(operands, scratch, tile)
    m = m_ref[...]
    empty = m <= MASKED / 2
    l = jnp.where(empty, 1, jnp.sum(l_ref[...], axis=1, keepdims=True))
    o = jnp.where(wide(m, h) <= MASKED / 2, 0, acc_ref[...] / wide(l, h))
    o_ref[...] = o.reshape(group, bq, h).astype(o_ref.dtype)
    lse = jnp.where(empty, -jnp.inf, m * LN2 + jnp.log(l))
    for g in range(group):
        lse_ref[g : g + 1, :] = lse[g * bq : (g + 1) * bq].T[:1]
