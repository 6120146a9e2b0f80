"""Work sharing for `paged_decode` on GPUs ("stream-K": Osama et al., 2023).

The tiles of all rows form one list, and every program takes an equal run of it. A row is one (sequence, kv head). A
long row is spread over many programs, and a program may take many short rows. Program p stores its partial result of
row r in slot p + r. Later programs have later runs, so no two pairs share a slot. A second kernel, in Triton, merges
each row's slots with the keys of this call and writes the token.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.paged_decode.append import Append, as_stored
from pallas_kernels.softmax import LN2, LOG2E, MASKED
from pallas_kernels.varying import output

MULTIPROCESSORS = 132
"""The number of multiprocessors of an H100, assumed without a GPU."""
MERGED = 1 << 11
"""The most numbers that are merged at once."""


class Shares(NamedTuple):
    """The rows, and the number of programs that share their tiles.

    There are `r` rows of `queries` queries each, and `t` tokens for each query head. `scale` gives logits to base 2.
    `t2` and `h2` are rounded up to powers of two.
    """

    r: int
    queries: int
    t: int
    h: int
    """The head_dim."""
    programs: int
    """The number of programs that share the rows' tiles."""

    @property
    def slots(self) -> int:
        return self.programs + self.r

    @property
    def scale(self) -> float:
        return self.h**-0.5 * LOG2E

    @property
    def t2(self) -> int:
        return pl.next_power_of_2(self.t)

    @property
    def h2(self) -> int:
        return pl.next_power_of_2(self.h)


def multiprocessors() -> int:
    device = jax.local_devices()[0]
    return device.core_count if device.platform == "gpu" else MULTIPROCESSORS


def row_table(length, ring_length, tiles: Callable):
    """Return the kernels' table of the rows, `[3 r+1]`.

    Its lines are the number of tiles before each row (and, as the last number, of all rows), the entries in each row's
    ring, and the entries in its global pages. `tiles(ring, length)` returns a row's number of tiles.
    """
    ring = jnp.zeros_like(length[:, 0]) if ring_length is None else ring_length
    ring, length = jnp.broadcast_to(ring[:, None], length.shape).reshape(-1), length.reshape(-1)
    row, other = jnp.arange(length.size + 1)[:, None], jnp.arange(length.size)
    parts = (other < row, tiles(ring, length)), (other == row, ring), (other == row, length)
    # There is one sum, so that XLA fuses it and the operations before it into one small kernel.
    return jnp.stack([jnp.where(*part, 0) for part in parts]).sum(2)


def share(program, total, shares: Shares):
    """Return the program's first tile and the tile after its last. If there are few tiles, programs have one or
    none."""
    programs = jnp.minimum(total, shares.programs)
    begin, stop = (jnp.minimum(p, programs) * total for p in (program, program + 1))
    return tuple(lax.div(x, jnp.maximum(programs, 1)) for x in (begin, stop))


def merge(
    shares: Shares, rows, q, new, slots, slot_lse, *, pool, append: Append | None, dtype, interpret: bool
):
    """Return the output `[r queries h]` of `dtype`, the log-sum-exp `[r queries]`, and the pool. If there is an
    `append`, the pool has this call's token.

    `rows` is the result of `row_table`, q is `[r queries h]`, and `new` has this call's keys and values `[b k t h]`.
    The slots are in float32: outputs `[slots queries h]` and log-sum-exps to base 2. q and the slots may have more
    queries.
    """
    r, queries, h = shares.r, shares.queries, shares.h
    k, v = (None, None) if new is None else (x.reshape(r, shares.t, h) for x in new)
    token = None, None
    if append is not None and pool.dtype == jnp.int8:
        token = jnp.split(as_stored(new, pool).reshape(r, 1, 2 * h), 2, -1)
    inputs = rows, q, k, v, slots, slot_lse, *token
    outputs = [output((r, queries, h), dtype, q), output((r, queries), jnp.float32, q)]
    places, entries, aliases = None, None, {}
    if append is not None:
        places, entries = jnp.stack([x.reshape(-1) for x in append]), pool.reshape(-1, pool.shape[2])
        outputs.append(output(entries.shape, pool.dtype, pool))
        aliases = {len(jax.tree.leaves(inputs)) + 1: 2}
    o, lse, *changed = pl.pallas_call(
        functools.partial(_merge, shares=shares, interpret=interpret),
        grid=(r, queries),
        out_shape=outputs,
        input_output_aliases=aliases,
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="paged_decode_merge",
    )(*inputs, places, entries)
    return o, lse, changed[0].reshape(pool.shape) if changed else pool


def _merge(
    rows_ref, q_ref, k_ref, v_ref, slots_ref, slot_lse_ref, key_ref, value_ref, places_ref, _,
    o_ref, lse_ref, *pool_refs, shares: Shares, interpret: bool,
):  # fmt: skip
    """Compute one query's output from its row's slots and from this call's keys up to itself. If the pool is int8, the
    token is written from `key_ref` and `value_ref`."""
    row, query = pl.program_id(0), pl.program_id(1)
    start, end, total = (rows_ref[0, x] for x in (row, row + 1, shares.r))
    programs = jnp.minimum(total, shares.programs)
    column = jnp.arange(shares.h2)
    exists = column < shares.h
    # A tile belongs to the last program whose share does not begin after it.
    first, last = (((x + 1) * programs - 1) // jnp.maximum(total, 1) for x in (start, end - 1))
    last = jnp.where(end > start, last, first - 1)

    m, l, o = jnp.float32(MASKED), jnp.float32(0), jnp.zeros(shares.h2, jnp.float32)
    if k_ref is not None:
        token = jnp.arange(shares.t2)
        seen = token <= query % shares.t
        mask = seen[:, None] & exists[None]
        k, v = (
            plt.load(x.at[row, token[:, None], column[None]], mask=mask, other=0).astype(jnp.float32)
            for x in (k_ref, v_ref)
        )
        q = plt.load(q_ref.at[row, query, column], mask=exists, other=0).astype(jnp.float32)
        x = jnp.where(seen, (q[None] * k).sum(1) * shares.scale, MASKED)
        m = x.max()
        p = jnp.exp2(x - m)
        l, o = p.sum(), (p[:, None] * v).sum(0)

    count = MERGED // shares.h2

    def slots(index, state):
        m, l, o = state
        program = first + index * count + jnp.arange(count)
        valid = program <= last
        x = plt.load(slot_lse_ref.at[program + row, query], mask=valid, other=MASKED)
        outputs = slots_ref.at[(program + row)[:, None], query, column[None]]
        part = plt.load(outputs, mask=valid[:, None] & exists[None], other=0)
        m_new = jnp.maximum(m, x.max())
        p = jnp.exp2(x - m_new)
        kept = jnp.exp2(m - m_new)
        return m_new, l * kept + p.sum(), o * kept + (p[:, None] * part).sum(0)

    m, l, o = lax.fori_loop(0, pl.cdiv(last + 1 - first, count), slots, (m, l, o))
    empty = m <= MASKED / 2
    l = jnp.where(empty, 1, l)
    o = jnp.where(empty, 0, o / l).astype(o_ref.dtype)
    plt.store(o_ref.at[row, query, column], o, mask=exists)
    lse_ref[row, query] = jnp.where(empty, -jnp.inf, m * LN2 + jnp.log(l))
    if pool_refs:
        repeated = shares.r // places_ref.shape[1]
        first = (query == 0) & (row % repeated == 0)
        places = row // repeated, places_ref
        token = (k_ref, v_ref) if key_ref is None else (key_ref, value_ref)
        pl.when(first)(lambda: _write(row, *places, *token, pool_refs[0], shares, interpret))


def _write(row, place, places_ref, k_ref, v_ref, pool_ref, shares: Shares, interpret: bool):
    """Write the row's token into its slot of the pool `[entries 2h]`, and the replaced entry to its new index."""
    slot, moved = places_ref[0, place], places_ref[1, place]
    column, entries = jnp.arange(shares.h2), pool_ref.shape[0]
    exists = column < shares.h
    sides = (0, k_ref), (shares.h, v_ref)
    clipped = jnp.minimum(slot, entries - 1)
    old = [plt.load(pool_ref.at[clipped, first + column], mask=exists, other=0) for first, _ in sides]
    if not interpret:
        plt.debug_barrier()  # several threads may read a number that one of them then writes
    for (first, new_ref), x in zip(sides, old, strict=True):
        plt.store(pool_ref.at[moved, first + column], x, mask=exists & (moved < entries))
        x = plt.load(new_ref.at[row, 0, column], mask=exists, other=0).astype(pool_ref.dtype)
        plt.store(pool_ref.at[slot, first + column], x, mask=exists & (slot < entries))
