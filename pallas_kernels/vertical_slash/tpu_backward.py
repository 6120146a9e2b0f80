"""The gradient of `vertical_slash` on a TPU: FlashAttention's recomputation (Dao et al., 2022), two kernels.

Probabilities are recomputed from the log-sum-exp. `dq` walks like the forward pass. For `dk`, `dv` and the gate's
gradient a grid step takes a tile of keys, in place, since the queries that see a key are contiguous.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.choose import target
from pallas_kernels.interpret import tpu_interpret
from pallas_kernels.softmax import LOG2E, MASKED, dot
from pallas_kernels.varying import output
from pallas_kernels.vertical_slash import key_lists
from pallas_kernels.vertical_slash.tpu_gather import in_parts, lists
from pallas_kernels.vertical_slash.tpu_walk import LANES, Blocks, Walk, blocks_of, lane_sums, wide
from pallas_kernels.vmem import vmem_limit


def tpu_backward(q, k, v, end, log_gate, window, o, lse, do, dlse, *, interpret=None):
    """Return the gradients of q, k, v and log_gate, given the forward pass's results and their cotangents."""
    b, n, t, _ = q.shape
    heads, s = k.shape[1:3]
    group = n // heads
    blocks = blocks_of_gradient(group, t, s, k.dtype)
    more = -t % blocks.queries

    def by_row(x, fill=0.0):
        x = x.reshape(b * heads, group, *x.shape[2:])
        return jnp.pad(x, ((0, 0), (0, 0), (0, more), *[(0, 0)] * (x.ndim - 3)), constant_values=fill)

    # The gradient of lse adds p·dlse to every logit's gradient p·(dp − delta), so dlse is part of delta.
    delta = jnp.sum(o.astype(jnp.float32) * do.astype(jnp.float32), -1) - dlse
    # An infinite log-sum-exp makes p = 0 for queries that saw nothing and for padding.
    lse = jnp.where(jnp.isneginf(lse), jnp.inf, lse) * LOG2E
    q_rows, do_rows = by_row(q), by_row(do)
    stats = jnp.stack([by_row(lse, jnp.inf), by_row(delta)], 2)
    keys = key_lists.by_row(k, v, end, log_gate)
    band, far = key_lists.in_place(*keys, window=window)
    arguments = q_rows, do_rows, stats
    walk = Walk(far, band, blocks, q_rows.shape[2] // blocks.queries, s - t, window)

    def part(row, rows, out):
        band, far = lists(*keys, row=row, rows=rows, window=window, block=blocks.keys, interpret=interpret)
        part_of_walk = dataclasses.replace(walk, far=far, band=band, row=row)
        return _gradient_of_queries(part_of_walk, *arguments, out, interpret)

    if end is None:
        (dq,) = _gradient_of_queries(walk, *arguments, (), interpret)
    else:
        (dq,) = in_parts(part, keys[0], q_rows)
    dq = dq[:, :, :t].reshape(q.shape)
    dk, dv, dgate = _gradient_of_keys(walk, *arguments, interpret)
    dgate = None if dgate is None else dgate.reshape(b, heads, s)
    return dq, dk.reshape(k.shape), dv.reshape(v.shape), dgate


def blocks_of_gradient(group: int, t: int, s: int, dtype: Any) -> Blocks:
    """Return the size of tiles: up to 1024 keys, for fewer loop steps, and about 1024 rows if the matrix unit is 256
    wide (v6e and v7x), else 512."""
    return blocks_of(group, t, s, dtype, 1024 if unit_width() > LANES else 512, most=1024)


def unit_width() -> int:
    """Return the columns of the matrix unit: 256 on v6e and v7x, 128 on others."""
    return pltpu.get_tpu_info().mxu_column_size if target().platform == "tpu" else LANES


class Sum(NamedTuple):
    """A sum of products `[n h]`.

    If the matrix unit is wider than h, the sum is kept transposed, `[h n]`. The unit is then filled by the tile of
    logits, and h rows pass through it.
    """

    ref: Any
    """The sum in vector memory, in float32."""
    transposed: bool
    """True if it is kept as `[h n]`."""

    @classmethod
    def scratch(cls, n: int, h: int) -> Any:
        return pltpu.VMEM((h, n) if h < unit_width() else (n, h), jnp.float32)

    @classmethod
    def of(cls, ref: Any, h: int) -> "Sum":
        ref[...] = jnp.zeros_like(ref)
        return cls(ref, h < unit_width())

    def add(self, x: jax.Array, y: jax.Array) -> None:
        """Add x·y."""
        self.ref[...] += dot(y.T, x, (1, 1)) if self.transposed else dot(x, y)

    def value(self) -> jax.Array:
        return self.ref[...].T if self.transposed else self.ref[...]


def _gradient_of_queries(walk, q, do, stats, out, interpret):
    _, group, _, h = q.shape
    bq = walk.blocks.queries
    arrays, specs = walk.operands()
    block = pl.BlockSpec((None, group, bq, h), lambda r, i, row: (row[0] + r, 0, i, 0))
    stats_spec = pl.BlockSpec((None, group, 2, bq), lambda r, i, row: (row[0] + r, 0, 0, i))
    return pl.pallas_call(
        functools.partial(_queries_kernel, walk),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(walk.rows, walk.n),
            in_specs=[*specs, block, block, stats_spec, *[pl.BlockSpec(memory_space=pl.ANY)] * len(out)],
            out_specs=[block],
            scratch_shapes=[
                pltpu.VMEM((group * bq, LANES), jnp.float32),
                pltpu.VMEM((group * bq, LANES), jnp.float32),
                Sum.scratch(group * bq, h),
                *walk.scratch(),
            ],
        ),
        out_shape=[output(q.shape, q.dtype, q)],
        input_output_aliases={len(arrays) + 3 + x: x for x in range(len(out))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            disable_bounds_checks=True,
            vmem_limit_bytes=vmem_limit("vertical_slash", group, h, q.dtype.itemsize),
        ),
        name="vertical_slash_dq",
        interpret=tpu_interpret(interpret),
    )(*arrays, q, do, stats, *out)


def _queries_kernel(walk, *refs):
    operands, (q_ref, do_ref, stats_ref, *_, dq_ref, lse_ref, delta_ref, acc_ref), scratch = walk.split(refs)
    group, bq, h = q_ref.shape
    for g in range(group):
        for at, ref in enumerate((lse_ref, delta_ref)):
            ref[g * bq : (g + 1) * bq] = jnp.broadcast_to(stats_ref[g, at : at + 1], (LANES, bq)).T
    sums = Sum.of(acc_ref, h)

    def tile(k, v, mask):
        q, do = (ref[...].reshape(group * bq, h) for ref in (q_ref, do_ref))
        x = mask(dot(q, k, (1, 1)) * (LOG2E / h**0.5))
        p = jnp.exp2(x - wide(lse_ref[...], x.shape[1]))
        dx = p * (dot(do, v, (1, 1)) - wide(delta_ref[...], x.shape[1]))
        sums.add(dx.astype(k.dtype), k)

    walk.run(operands, scratch, tile)
    dq_ref[...] = (sums.value() * h**-0.5).reshape(group, bq, h).astype(dq_ref.dtype)


def _gradient_of_keys(walk, q, do, stats, interpret):
    r, group, _, h = q.shape
    bq, bk = walk.blocks
    keys = key_lists.pad_marks(walk.far, bk)
    # The far list's start is the key's index or, with gates, the first index beyond the window.
    begins = keys.start - (walk.window if walk.gated else 0)
    gate = None if keys.log_gate is None else (keys.log_gate * LOG2E)[:, None]
    tables = jnp.stack(key_lists.tiles(keys, bk), 1)
    rows, (_, s) = group * bq, walk.far.start.shape
    stats = stats.reshape(r, group, 2, walk.n, bq).transpose(0, 3, 2, 1, 4).reshape(r, walk.n, 2, rows)

    def only_gated(x):
        return x if walk.gated else None

    keys_spec = pl.BlockSpec((None, bk, h), lambda r, j: (r, j, 0))
    marks = [pl.BlockSpec((None, lines, bk), lambda r, j: (r, 0, j)) for lines in (2, 1)]
    in_memory = pl.BlockSpec(memory_space=pl.ANY)
    column = pltpu.VMEM((bk, LANES), jnp.int32)
    float_column = pltpu.VMEM((bk, LANES), jnp.float32)
    dk, dv, dgate = pl.pallas_call(
        functools.partial(_keys_kernel, walk),
        grid=(r, pl.cdiv(s, bk)),
        in_specs=[
            pl.BlockSpec((None, *tables.shape[1:]), lambda r, j: (r, 0, 0), memory_space=pltpu.SMEM),
            keys_spec,
            keys_spec,
            marks[0],
            only_gated(marks[1]),
            *[in_memory] * 3,
        ],
        out_specs=[keys_spec, keys_spec, only_gated(marks[1])],
        out_shape=[
            output(keys.k.shape, keys.k.dtype, q),
            output(keys.v.shape, keys.v.dtype, q),
            only_gated(output((r, 1, s), jnp.float32, q)),
        ],
        scratch_shapes=[
            column,
            column,
            only_gated(float_column),
            Sum.scratch(bk, h),
            Sum.scratch(bk, h),
            only_gated(float_column),
            pltpu.VMEM((2, group, bq, h), q.dtype),
            pltpu.VMEM((2, group, bq, h), do.dtype),
            pltpu.VMEM((2, 2, rows), jnp.float32),
            pltpu.SemaphoreType.DMA((2,)),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"),
            disable_bounds_checks=True,
            vmem_limit_bytes=vmem_limit("vertical_slash", group, h, q.dtype.itemsize),
        ),
        name="vertical_slash_dkv",
        interpret=tpu_interpret(interpret),
    )(tables, keys.k, keys.v, jnp.stack([begins, keys.stop], 1), gate, q, do, stats)
    return dk, dv, dgate if dgate is None else dgate[:, 0]


def _keys_kernel(walk, tables, k_ref, v_ref, marks_ref, gate_ref, q_hbm, do_hbm, stats_hbm, *refs):
    dk_ref, dv_ref, dgate_ref, begins_ref, stop_ref, gate_column, dk_acc, dv_acc, dgate_acc, *rest = refs
    q_buffer, do_buffer, stats_buffer, semaphores = rest
    bq, bk = walk.blocks
    _, group, _, h = q_buffer.shape
    rows = group * bq
    row, j = pl.program_id(0), pl.program_id(1)

    def transpose_line(line):
        return jnp.broadcast_to(line, (LANES, bk)).T

    begins_ref[...], stop_ref[...] = transpose_line(marks_ref[0:1]), transpose_line(marks_ref[1:2])
    dk, dv = Sum.of(dk_acc, h), Sum.of(dv_acc, h)
    if walk.gated:
        gate_column[...] = transpose_line(gate_ref[...])
        dgate_acc[...] = jnp.zeros_like(dgate_acc)

    def query(i):
        return walk.first + i * bq

    def copies(i, slot, act):
        of_block = (row, slice(None), pl.ds(pl.multiple_of(i * bq, bq), bq))
        sources = q_hbm.at[of_block], do_hbm.at[of_block], stats_hbm.at[row, i]
        for source, buffer in zip(sources, (q_buffer, do_buffer, stats_buffer), strict=True):
            act(pltpu.make_async_copy(source, buffer.at[slot], semaphores.at[slot]))

    def tile(i, slot, masked):
        q, do = (buffer[slot].reshape(rows, h) for buffer in (q_buffer, do_buffer))
        lse, delta = stats_buffer[slot, 0:1], stats_buffer[slot, 1:2]
        x = dot(k_ref[...], q, (1, 1)) * (LOG2E / h**0.5)
        begins = wide(begins_ref[...], rows)
        index = lax.broadcasted_iota(jnp.int32, (bk, group, bq), 2).reshape(bk, rows) + query(i)

        def beyond(x):
            """Return `x` where the gate applies, else 0. A tile without a mask is all beyond the window."""
            return jnp.where(index >= begins + walk.window, x, 0) if masked else x

        if walk.gated:
            x += beyond(wide(gate_column[...], rows))
        if masked:
            x = jnp.where((index >= begins) & (index < wide(stop_ref[...], rows)), x, MASKED)
        p = jnp.exp2(x - lse)
        dx = p * (dot(v_ref[...], do, (1, 1)) - delta)
        dv.add(p.astype(do.dtype), do)
        dk.add(dx.astype(q.dtype), q)
        if walk.gated:
            dgate_acc[...] += lane_sums(beyond(dx))

    # Blocks of queries from the tile's first key on, until none of its keys is seen.
    first = jnp.maximum(j * bk - walk.first, 0) // bq
    last = jnp.minimum(pl.cdiv(jnp.minimum(tables[2, j], query(walk.n)) - walk.first, bq), walk.n)

    def step(i, carry):
        slot = (i - first) % 2

        @pl.when(i + 1 < last)
        def _():
            copies(i + 1, 1 - slot, lambda copy: copy.start())

        copies(i, slot, lambda copy: copy.wait())
        full = (tables[0, j] <= query(i)) & (tables[1, j] >= query(i + 1))
        pl.when(full)(lambda: tile(i, slot, False))
        pl.when(~full)(lambda: tile(i, slot, True))
        return carry

    @pl.when(first < last)
    def _():
        copies(first, 0, lambda copy: copy.start())

    lax.fori_loop(first, last, step, None)
    # A key that no query sees may be NaN. There p is 0, but dx is not.
    is_seen = wide(begins_ref[...], h) < wide(stop_ref[...], h)
    dk_ref[...] = jnp.where(is_seen, dk.value() * h**-0.5, 0).astype(dk_ref.dtype)
    dv_ref[...] = dv.value().astype(dv_ref.dtype)
    if walk.gated:
        sums = jnp.sum(dgate_acc[...], axis=1, keepdims=True)
        sums = jnp.broadcast_to(sums, (bk, LANES)).T[:1]
        dgate_ref[...] = jnp.where(marks_ref[0:1] < marks_ref[1:2], sums, 0)
