"""`vertical_slash` forward for Hopper, in Mosaic GPU: FlashAttention-3 (Shah et al., 2024) over lists of keys.

A program has three warpgroups. One only moves tiles of keys into shared memory by TMA, several tiles ahead. The other
two have 64 queries each and take turns: while one uses the tensor cores, the other computes its softmax. They take two
query heads of one kv head if its group is even, else consecutive queries of one head. Either way a tile is fetched once
for both. Programs of one kv head start next to each other, so that the other programs of the group find the tile in L2.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.choose import target
from pallas_kernels.softmax import LN2, LOG2E, MASKED
from pallas_kernels.supported import require
from pallas_kernels.varying import alike, output
from pallas_kernels.vertical_slash import key_lists
from pallas_kernels.vertical_slash.key_lists import Keys

QUERIES = 64
"""Queries of a warpgroup: the rows of a wgmma. With twice as many outputs no registers would be left for logits."""
WORKERS = 2
FETCHER = WORKERS

SIZES = {64: (128, 4), 128: (128, 2), 256: (64, 2)}
"""The keys of a tile, and the number of tiles that fit into 227 KB of shared memory with the queries, by head_dim."""

KINDS = "H100", "H200"
"""The GPUs that have these tensor cores. Neither older nor newer ones do."""

ROWS = plgpu.Layout.WGMMA.reduce(1)
COLUMNS = plgpu.Layout.WGMMA.reduce(0)


class Machine(NamedTuple):
    """Operations that the interpreter of jax 0.10 lacks. Callers can replace them to interpret the kernel."""

    layout: Callable[[jax.Array, Any], jax.Array]
    """Cast registers to a layout."""
    scores: Callable[[Any, Any, Callable[[], None]], jax.Array]
    """Return q · kᵀ, and run a function in the meantime."""
    weighted: Callable[[jax.Array, jax.Array, Any], Any]
    """Return o + p · v."""


def _scores(q, k, meanwhile):
    """Return q · kᵀ. `meanwhile` runs while the tensor cores compute."""

    def product(acc):
        plgpu.wgmma(acc, q, k.transpose((1, 0)))
        meanwhile()
        return acc[...]

    return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((q.shape[0], k.shape[0]), jnp.float32))


def _weighted(o, p, v):
    """Return o + p · v."""
    return pl.run_state(lambda acc: plgpu.wgmma(acc, p, v))(plgpu.WGMMAAccumulatorRef.init(o))


HOPPER = Machine(plgpu.layout_cast, _scores, _weighted)


class Plan(NamedTuple):
    """The compile-time settings of a kernel. `banded`: there is a band. `gated`: the far list has gates.

    `stages` tiles of `keys` are in shared memory. A kv head has `group` query heads, and a program takes `heads` of
    them.
    """

    banded: bool
    gated: bool
    keys: int
    stages: int
    group: int
    heads: int
    first: int
    """The index of the first query."""
    window: int
    """The size of the local window in tokens."""

    @property
    def queries(self) -> int:
        """The number of indices that a program's queries cover."""
        return QUERIES * WORKERS // self.heads


def targeted() -> bool:
    """Return True if the computation is for an H100 or H200."""
    return any(kind in target().kind for kind in KINDS)


def takes(q: jax.Array) -> bool:
    """Return True if the computation is for an H100 or H200, and the kernel takes q."""
    return targeted() and q.dtype == jnp.bfloat16 and q.shape[-1] in SIZES


def hopper(q, k, v, end, log_gate, window, dtype, *, interpret=None):
    band, far = key_lists.gathered(*key_lists.zero_unseen_by_row(k, v, end, log_gate), window=window)
    return attend(q, band, far, dtype, first=k.shape[2] - q.shape[2], window=window, interpret=interpret)


def attend(q, band, far, dtype, *, first=0, window=1, interpret=None, machine=HOPPER):
    """Compute o `[b n t h]` of `dtype` and lse `[b n t]` of queries `[b n t h]` over lists of keys.

    `first` is the index of the first query. If `dtype` is wider than bfloat16, the kernel writes the nearest bfloat16
    of each output and, in a second array, the nearest bfloat16 of the rest. That is 16 bits of mantissa in as many
    bytes as float32, whose tile would not fit into shared memory.
    """
    b, n, t, h = q.shape
    parts = 1 if dtype == q.dtype else 2
    require(
        "vertical_slash",
        "hopper",
        (h in SIZES, f"head_dim {', '.join(map(str, SIZES))}, not {h}"),
        (q.dtype == jnp.bfloat16, f"bfloat16, not {q.dtype}"),
        *(
            (x.dtype == q.dtype, f"{name} of q's dtype {q.dtype}, not {x.dtype}")
            for name, x in (("k", far.k), ("v", far.v))
        ),
        (interpret is not None or targeted(), f"{' or '.join(KINDS)}, not {target().kind}"),
    )
    keys, stages = SIZES[h]
    group = b * n // far.k.shape[0]
    heads = 2 - group % 2
    plan = Plan(band is not None, far.log_gate is not None, keys, stages, group, heads, first, window)
    blocks = pl.cdiv(t, plan.queries)
    begin = first + plan.queries * jnp.arange(blocks)
    far = key_lists.pad(far, keys)
    arrays = [jnp.stack(key_lists.spans(far, keys, begin, begin + plan.queries - 1), -1)]
    for part in (far,) if band is None else (far, key_lists.pad(band, keys)):
        arrays += [part.k, part.v, _marks(part)]
    q = jnp.pad(q.reshape(b * n, t, h), ((0, 0), (0, blocks * plan.queries - t), (0, 0)))
    swizzled = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
    tile = plgpu.SMEM((stages, keys, h), q.dtype, transforms=swizzled)
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan, machine),
        out_type=[*[output(q.shape, q.dtype, q)] * parts, output(q.shape[:2], jnp.float32, q)],
        scratch_types=dict(
            q_tile=plgpu.SMEM((WORKERS, QUERIES, h), q.dtype, transforms=swizzled),
            lse_tile=plgpu.SMEM((WORKERS, QUERIES), jnp.float32),
            k_tiles=tile,
            v_tiles=tile,
            marks=plgpu.SMEM((stages, arrays[3].shape[1], keys), jnp.int32),
            q_ready=plgpu.Barrier(num_barriers=WORKERS),
            k_ready=plgpu.Barrier(num_barriers=stages, num_arrivals=2),
            v_ready=plgpu.Barrier(num_barriers=stages),
            k_free=plgpu.Barrier(num_barriers=stages, num_arrivals=WORKERS),
            v_free=plgpu.Barrier(num_barriers=stages, num_arrivals=WORKERS),
            turn=plgpu.Barrier(num_arrivals=WORKERS),
        ),
        grid=(b * n // heads, blocks),
        grid_names=("heads", "block"),
        num_threads=WORKERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="vertical_slash_hopper",
        interpret=interpret,
    )
    # jax 0.10 assumes that the outputs are equal on all devices, and would sum their cotangents over them.
    (*o, lse), _ = alike(kernel(*arrays, q), q)
    o = functools.reduce(jnp.add, (x[:, :t].astype(dtype) for x in o))
    return o.reshape(b, n, t, h), lse[:, :t].reshape(b, n, t)


def _marks(keys: Keys) -> jax.Array:
    """Stack start, stop and the bits of the gate, if any, into `[r 2 c]` or `[r 3 c]`, so that one copy fetches
    them."""
    gate = [] if keys.log_gate is None else [lax.bitcast_convert_type(keys.log_gate, jnp.int32)]
    return jnp.stack([keys.start, keys.stop, *gate], 1)


def _kernel(plan, machine, spans, *refs, **scratch):
    count = 6 if plan.banded else 3
    far, band, (q, *o, lse) = refs[:3], refs[3:count], refs[count:]
    blocks = spans.shape[1]
    # The longest walks start first.
    block = blocks - 1 - lax.axis_index("block")
    row = lax.div(lax.axis_index("heads") * plan.heads, plan.group)
    past, full, begun = (spans[row, block, at] for at in range(3))
    begin = plan.first + block * plan.queries
    # TMA copies whole tiles of 8 rows.
    start = lax.div(jnp.maximum(begin - plan.window + 1, 0), 8) * 8
    near = pl.cdiv(begin + plan.queries - start, plan.keys) if plan.banded else 0
    walk = Walk(row, start, near, past, jnp.maximum(past, full), begun)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < WORKERS)
    def _():
        plgpu.set_max_registers(240, action="increase")
        _work(plan, machine, walk, warpgroup, block, q, o, lse, **scratch)

    @pl.when(warpgroup == FETCHER)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        _fetch(plan, walk, far, band, **scratch)


class Walk(NamedTuple):
    """A program's tiles of kv head `row`: `near` tiles of the band from key `start` on, then the tiles of the far list
    from `past` to `begun`. The tiles up to `full` need no mask."""

    row: Any
    start: Any
    near: Any
    past: Any
    full: Any
    begun: Any


def _fetch(plan, walk, far, band, *, k_tiles, v_tiles, marks, k_ready, v_ready, k_free, v_free, **_):
    def fetch(keys, at, i):
        """Fetch the tile at key `at` as the program's `i`-th tile. Entries beyond a list are zeros, which no query
        sees."""
        k, v, mark = (x.at[walk.row] for x in keys)
        slot = lax.rem(i, plan.stages)
        entries = pl.ds(at, plan.keys)
        plgpu.barrier_wait(k_free.at[slot])
        plgpu.copy_gmem_to_smem(k.at[entries], k_tiles.at[slot], k_ready.at[slot])
        kinds = pl.ds(0, mark.shape[0])
        plgpu.copy_gmem_to_smem(mark.at[:, entries], marks.at[slot, kinds], k_ready.at[slot])
        plgpu.barrier_wait(v_free.at[slot])
        plgpu.copy_gmem_to_smem(v.at[entries], v_tiles.at[slot], v_ready.at[slot])

    if plan.banded:
        pl.loop(0, walk.near)(lambda j: fetch(band, walk.start + j * plan.keys, j))
    pl.loop(walk.past, walk.begun)(lambda j: fetch(far, j * plan.keys, walk.near + j - walk.past))
    for slot in range(plan.stages):
        plgpu.barrier_wait(k_free.at[slot])
        plgpu.barrier_wait(v_free.at[slot])


def _work(
    plan, machine, walk, worker, block, q, o, lse, *,
    q_tile, lse_tile, k_tiles, v_tiles, marks, q_ready, k_ready, v_ready, k_free, v_free, turn,
):  # fmt: skip
    h = q.shape[2]
    head = lax.axis_index("heads") * plan.heads + lax.rem(worker, plan.heads)
    queries = pl.ds(block * plan.queries + lax.div(worker, plan.heads) * QUERIES, QUERIES)
    index = plan.first + queries.start
    shape = QUERIES, plan.keys
    scale = LOG2E / h**0.5

    def swap():
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)

    def tile(masked, gated, i, state):
        m, l, acc = state
        slot = lax.rem(i, plan.stages)
        mark = lambda at: machine.layout(marks[slot, at], COLUMNS)  # noqa: E731
        plgpu.barrier_wait(k_ready.at[slot])
        x = machine.scores(q_tile.at[worker], k_tiles.at[slot], swap)
        if gated:
            gate = lax.bitcast_convert_type(mark(2), jnp.float32) * h**0.5
            x += lax.broadcast_in_dim(gate, shape, (1,))
        if masked:
            place = machine.layout(lax.broadcasted_iota(jnp.int32, shape, 0), plgpu.Layout.WGMMA) + index
            seen = place >= lax.broadcast_in_dim(mark(0), shape, (1,))
            seen &= place < lax.broadcast_in_dim(mark(1), shape, (1,))
            x = jnp.where(seen, x, MASKED / scale)
        if masked or gated:
            # The copy that overwrites the marks is asynchronous. A fence makes it wait for these reads.
            plgpu.commit_smem()
        plgpu.barrier_arrive(k_free.at[slot])
        m_new = jnp.maximum(m, x.max(1) * scale)
        kept = jnp.exp2(m - m_new)
        p = jnp.exp2(x * scale - lax.broadcast_in_dim(m_new, shape, (0,)))
        l = l * kept + p.sum(1)
        acc *= lax.broadcast_in_dim(kept, acc.shape, (0,))
        # The barrier keeps the compiler from moving any of this behind the turn.
        m, l, acc, p = lax.optimization_barrier((m_new, l, acc, p.astype(q.dtype)))
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(v_ready.at[slot])
        plgpu.barrier_wait(turn)
        acc = machine.weighted(acc, p, v_tiles.at[slot])
        plgpu.barrier_arrive(v_free.at[slot])
        return m, l, acc

    for slot in range(plan.stages):
        plgpu.barrier_arrive(k_free.at[slot])
        plgpu.barrier_arrive(v_free.at[slot])
    plgpu.copy_gmem_to_smem(q.at[head, queries], q_tile.at[worker], q_ready.at[worker])
    row = lambda x: machine.layout(jnp.full(QUERIES, x, jnp.float32), ROWS)  # noqa: E731
    acc = machine.layout(jnp.zeros((QUERIES, h), jnp.float32), plgpu.Layout.WGMMA)
    state = row(MASKED), row(0), acc
    plgpu.barrier_wait(q_ready.at[worker])
    pl.when(worker == 1)(swap)
    if plan.banded:
        state = lax.fori_loop(0, walk.near, functools.partial(tile, True, False), state)
    begin, full, stop = (walk.near + x - walk.past for x in (walk.past, walk.full, walk.begun))
    state = lax.fori_loop(begin, full, functools.partial(tile, False, plan.gated), state)
    m, l, acc = lax.fori_loop(full, stop, functools.partial(tile, True, plan.gated), state)
    pl.when(worker == 0)(swap)
    seen = m > MASKED / 2
    l = jnp.where(seen, l, 1)
    weight = jnp.where(seen, 1 / l, 0)
    lse_tile[worker] = jnp.where(seen, m * LN2 + jnp.log(l), -jnp.inf)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(lse_tile.at[worker], lse.at[head, queries])
    rest = acc * lax.broadcast_in_dim(weight, acc.shape, (0,))
    for part in o:
        nearest = rest.astype(q.dtype)
        q_tile[worker] = nearest
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_tile.at[worker], part.at[head, queries])
        plgpu.wait_smem_to_gmem(0)
        rest -= nearest.astype(rest.dtype)
