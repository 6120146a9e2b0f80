"""`vertical_slash` forward on a TPU. See `tpu_walk.py` for the walk and `tpu_backward.py` for the gradient."""

import dataclasses
import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.interpret import tpu_interpret
from pallas_kernels.softmax import LN2, LOG2E, MASKED, dot
from pallas_kernels.supported import require_attention
from pallas_kernels.varying import output
from pallas_kernels.vertical_slash import key_lists
from pallas_kernels.vertical_slash.tpu_gather import in_parts, lists
from pallas_kernels.vertical_slash.tpu_walk import LANES, Walk, blocks_of, lane_sums, wide
from pallas_kernels.vmem import vmem_limit


def tpu(q, k, v, end, log_gate, window, dtype, *, interpret=None):
    require_attention("vertical_slash", "tpu", q, k=k, v=v)
    b, n, t, h = q.shape
    s = k.shape[2]
    keys = key_lists.by_row(k, v, end, log_gate)
    q = q.reshape(len(keys[0]), -1, t, h)
    blocks = blocks_of(q.shape[1], t, s, q.dtype)
    band, far = key_lists.in_place(*keys, window=window)
    walk = Walk(far, band, blocks, pl.cdiv(t, blocks.queries), s - t, window)

    def part(row, rows, out):
        band, far = lists(*keys, row=row, rows=rows, window=window, block=blocks.keys, interpret=interpret)
        return _attend_walk(q, dataclasses.replace(walk, far=far, band=band, row=row), dtype, out, interpret)

    if end is None:
        o, lse = _attend_walk(q, walk, dtype, (), interpret)
    else:
        o, lse = in_parts(part, keys[0], *_outputs(q, dtype))
    return o.reshape(b, n, t, h), lse.reshape(b, n, t)


def attend(q, band, far, dtype, *, interpret=None):
    """Compute o `[b n t h]` of `dtype` and lse `[b n t]` of queries `[b n t h]` over lists of keys.

    The first query has index 0.
    """
    b, n, t, h = q.shape
    q = q.reshape(far.k.shape[0], -1, t, h)
    blocks = blocks_of(q.shape[1], t, far.k.shape[1], q.dtype)
    o, lse = _attend_walk(q, Walk(far, band, blocks, pl.cdiv(t, blocks.queries), 0, 1), dtype, (), interpret)
    return o.reshape(b, n, t, h), lse.reshape(b, n, t)


def _attend_walk(q, walk, dtype, out, interpret):
    """Compute o and lse of the queries `[r g t h]` of the walk's rows. If `out` is given, they are written into it."""
    _, group, _, h = q.shape
    bq = walk.blocks.queries
    arrays, specs = walk.operands()
    block = pl.BlockSpec((None, group, bq, h), lambda r, i, row: (row[0] + r, 0, i, 0))
    rows = group * bq
    aliases = {len(arrays) + 1 + x: x for x in range(len(out))}
    return pl.pallas_call(
        functools.partial(_kernel, walk),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(walk.rows, walk.n),
            in_specs=[*specs, block, *[pl.BlockSpec(memory_space=pl.ANY)] * len(out)],
            out_specs=[block, pl.BlockSpec((None, group, bq), lambda r, i, row: (row[0] + r, 0, i))],
            scratch_shapes=[
                pltpu.VMEM((rows, LANES), jnp.float32),
                pltpu.VMEM((rows, LANES), jnp.float32),
                pltpu.VMEM((rows, h), jnp.float32),
                *walk.scratch(),
            ],
        ),
        out_shape=_outputs(q, dtype),
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            disable_bounds_checks=True,
            vmem_limit_bytes=vmem_limit("vertical_slash", group, h, q.dtype.itemsize),
        ),
        name="vertical_slash",
        interpret=tpu_interpret(interpret),
    )(*arrays, q, *out)


def _outputs(q, dtype):
    return [output(q.shape, dtype, q), output(q.shape[:3], jnp.float32, q)]


def _kernel(walk, *refs):
    operands, (q_ref, *_, o_ref, lse_ref, m_ref, l_ref, acc_ref), scratch = walk.split(refs)
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
