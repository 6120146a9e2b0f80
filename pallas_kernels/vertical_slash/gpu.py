"""`vertical_slash` forward on a GPU, in Triton. A program computes one block of queries of one query head."""

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.interpret import gpu_interpret
from pallas_kernels.softmax import LN2, LOG2E, MASKED, dot
from pallas_kernels.supported import require_attention
from pallas_kernels.varying import output
from pallas_kernels.vertical_slash import key_lists
from pallas_kernels.vertical_slash.gpu_walk import FORWARD, Walk, blocks_of, load_rows, store_rows


def gpu(q, k, v, end, log_gate, window, dtype, *, interpret=None):
    require_attention("vertical_slash", "gpu", q, k=k, v=v)
    band, far = key_lists.gathered(*key_lists.zero_unseen_by_row(k, v, end, log_gate), window=window)
    return attend(q, band, far, dtype, first=k.shape[2] - q.shape[2], window=window, interpret=interpret)


def attend(q, band, far, dtype, *, first=0, window=1, interpret=None):
    """Compute o `[b n t h]` of `dtype` and lse `[b n t]` of queries `[b n t h]` over lists of keys.

    `first` is the index of the first query.
    """
    b, n, t, h = q.shape
    blocks = blocks_of(FORWARD, t, h, q.dtype)
    walk = Walk(far, band, blocks, first, window)
    arrays, specs = walk.operands(t, b * n // far.k.shape[0])
    head = pl.BlockSpec((None, t, h), lambda x, i: (x, 0, 0))
    o, lse = pl.pallas_call(
        functools.partial(_kernel, walk),
        grid=(b * n, pl.cdiv(t, blocks.queries)),
        in_specs=[*specs, head],
        out_specs=[head, pl.BlockSpec((None, t), lambda x, i: (x, 0))],
        out_shape=[output((b * n, t, h), dtype, q), output((b * n, t), jnp.float32, q)],
        compiler_params=plt.CompilerParams(num_warps=blocks.warps, num_stages=3),
        name="vertical_slash",
        interpret=gpu_interpret(interpret),
    )(*arrays, q.reshape(b * n, t, h))
    return o.reshape(q.shape), lse.reshape(b, n, t)


def _kernel(walk, *refs):
    operands, (q_ref, o_ref, lse_ref) = walk.split(refs)
    bq = walk.blocks.queries
    start = pl.program_id(1) * bq
    q = load_rows(q_ref, start, bq)
    scale = LOG2E / q_ref.shape[1] ** 0.5

    def step(k, v, mask, state):
        m, l, acc = state
        x = mask(dot(q, k, (1, 1)) * scale)
        m_new = jnp.maximum(m, x.max(1))
        p = jnp.exp2(x - m_new[:, None])
        kept = jnp.exp2(m - m_new)
        return m_new, l * kept + p.sum(1), acc * kept[:, None] + dot(p.astype(v.dtype), v)

    row = jnp.zeros(bq, jnp.float32)
    m, l, acc = walk.run(operands, step, (row + MASKED, row, jnp.zeros(q.shape, jnp.float32)))
    empty = m <= MASKED / 2
    l = jnp.where(empty, 1, l)
    store_rows(o_ref, start, jnp.where(empty[:, None], 0, acc / l[:, None]))
    store_rows(lse_ref, start, jnp.where(empty, -jnp.inf, m * LN2 + jnp.log(l)))
