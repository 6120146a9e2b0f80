"""`paged_decode` for Hopper, in Mosaic GPU: TMA fetches many pages ahead of the tensor cores.

Each multiprocessor runs one program, which takes an equal share of all rows' tiles (`stream_k.py`). One of its two
warpgroups only moves pages into shared memory, as far ahead as there is space; the other computes. A tile has entries
of the ring or of the global pages, never of both, and only pages that hold entries are fetched. Decoding is bound by
memory: a group of 4 query heads uses 4 of the 64 rows of a tensor core, and still waits for keys.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.choose import target
from pallas_kernels.paged_decode.chunked import TOKENS, attend_many
from pallas_kernels.paged_decode.stream_k import Shares, merge, multiprocessors, row_table, share
from pallas_kernels.softmax import LOG2E, MASKED
from pallas_kernels.supported import require
from pallas_kernels.varying import output
from pallas_kernels.vertical_slash.hopper import HOPPER, KINDS, ROWS, attend

QUERIES = 64
"""The rows of a wgmma."""
SIZES = {64: (128, 6), 128: (128, 2), 256: (64, 2)}
"""The keys of a tile, and the number of tiles that fit into the 227 KB of shared memory with queries and output, by
head_dim. While one tile is in use, at least 64 KB are in flight; about 40 KB keep the memory busy."""
FANOUT = 16
"""The fan-out of the search for a row. A step reads many numbers at once, since the next step waits for them."""


class Plan(NamedTuple):
    """The tiles in shared memory: `stages` tiles of `keys` entries, each filled with `pieces` pieces of `piece`
    entries.

    A piece is as many entries as one copy can fetch from a page.
    """

    shares: Shares
    """The rows, and the programs that share their tiles."""
    keys: int
    stages: int
    piece: int
    page: int
    """The number of entries of a page."""
    ring_pages: int
    """The number of columns of a row's table that are ring pages."""

    @property
    def pieces(self) -> int:
        return self.keys // self.piece

    @property
    def tile(self) -> int:
        """The number of entries of a tile."""
        return self.pieces * self.piece


def hopper(
    q, pool, page_table, length, ring_length, ring_pages, new, bias, scale, dtype, append=None, interpret=None,
    machine=HOPPER,
):  # fmt: skip
    b, n, t, h = q.shape
    heads = page_table.shape[1]
    kind, page = target().kind, pool.shape[1]
    require(
        "paged_decode",
        "hopper",
        (bias is None, "no bias"),
        (h in SIZES, f"head_dim {', '.join(map(str, SIZES))}, not {h}"),
        (q.dtype == jnp.bfloat16, f"bfloat16, not {q.dtype}"),
        (pool.dtype == q.dtype, f"pool of q's dtype {q.dtype}, not {pool.dtype}"),
        (page % 8 == 0, f"pages of a multiple of 8 entries, not {page}"),
        (interpret is not None or any(x in kind for x in KINDS), f"{' or '.join(KINDS)}, not {kind}"),
    )
    if t > TOKENS:
        many = functools.partial(attend, dtype=jnp.float32, interpret=interpret, machine=machine)
        stored = q, pool, page_table, length, ring_length, ring_pages, new, bias, scale
        return attend_many(many, "hopper", *stored, dtype, append)
    group = n // heads
    # If there are more queries than a wgmma has rows, split the group as if fewer heads shared the pages.
    split = next(x for x in range(1, group + 1) if group % x == 0 and group // x * t <= QUERIES)
    page_table, length, new = _repeated(split, page_table, length, new)
    keys, stages = SIZES[h]
    r, queries, columns = b * heads * split, group // split * t, page_table.shape[2]
    piece = max(x for x in range(8, keys + 1, 8) if page % x == 0)
    shares = Shares(r, queries, t, h, min(multiprocessors(), r * -(-columns * page // keys)))
    plan = Plan(shares, keys, stages, piece, page, ring_pages)
    rows = row_table(length, ring_length, lambda *prefixes: sum(pl.cdiv(x, plan.tile) for x in prefixes))
    copied = -(-queries // 8) * 8  # TMA copies tiles of 8 rows.
    q_rows = jnp.pad(q.reshape(r, queries, h), ((0, 0), (0, copied - queries), (0, 0)))
    swizzle = plgpu.SwizzleTransform(128)
    swizzled = plgpu.TilingTransform((8, 64)), swizzle
    slots = plgpu.kernel(
        functools.partial(_kernel, plan, machine),
        out_type=[
            output((shares.slots, copied, h), jnp.float32, q),
            output((shares.slots, copied), jnp.float32, q),
        ],
        scratch_types=dict(
            q_tile=plgpu.SMEM((QUERIES, h), q.dtype, transforms=swizzled),
            o_tile=plgpu.SMEM(
                (QUERIES, h), jnp.float32, transforms=(plgpu.TilingTransform((8, 32)), swizzle)
            ),
            lse_tile=plgpu.SMEM((QUERIES,), jnp.float32),
            tiles=plgpu.SMEM((stages, keys, 2 * h), q.dtype, transforms=swizzled),
            q_ready=plgpu.Barrier(),
            ready=plgpu.Barrier(num_barriers=stages, num_arrivals=plan.pieces),
            free=plgpu.Barrier(num_barriers=stages),
        ),
        grid=(shares.programs,),
        grid_names=("program",),
        num_threads=2,
        thread_name="warpgroup",
        # A row of logits is in one warp, so no sum or maximum goes through shared memory.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name="paged_decode_hopper",
        interpret=interpret,
    )(rows, page_table.reshape(r, columns), q_rows, pool.reshape(-1, 2 * h))
    options = {"pool": pool, "append": append, "dtype": dtype, "interpret": interpret is not None}
    o, lse, pool = merge(shares, rows, q_rows, new, *slots, **options)
    return o.reshape(b, n, t, h), lse.reshape(b, n, t), pool


def _repeated(split: int, page_table, length, new):
    if split == 1:
        return page_table, length, new
    new = None if new is None else tuple(jnp.repeat(x, split, 1) for x in new)
    return jnp.repeat(page_table, split, 1), jnp.repeat(length, split, 1), new


def _kernel(plan, machine, rows, table, q, pool, slots, slot_lse, **scratch):
    program, shares = lax.axis_index("program"), plan.shares
    walk = Walk(plan, rows, *share(program, rows[0, shares.r], shares))
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == 0)
    def _():
        _work(walk, machine, program, q, slots, slot_lse, **scratch)

    @pl.when(warpgroup == 1)
    def _():
        _fetch(walk, table, pool, **scratch)


class Tile(NamedTuple):
    """A tile: the first `column` of its region (ring or global) in the table, and its first entry in that region."""

    column: Any
    place: Any
    stored: Any
    """The number of entries that are stored."""


class Walk(NamedTuple):
    """A program's share of the `rows`: the tiles from `begin` to `stop`."""

    plan: Plan
    rows: Any
    begin: Any
    stop: Any

    def row_of(self, tile):
        """Return the row of the tile: the last row that does not start after it."""
        r, row = self.plan.shares.r, jnp.int32(0)
        step = 1
        while step * FANOUT < r:
            step *= FANOUT
        while step:
            ahead = range(1, min(FANOUT, -(-r // step)))
            starts = [self.rows[0, jnp.minimum(row + x * step, r)] for x in ahead]
            row += step * sum((start <= tile).astype(jnp.int32) for start in starts)
            step //= FANOUT
        return row

    def each_row(self, body):
        """Run `body(row, start, begin, stop)` for each row. `start` is the row's first tile, `begin` to `stop` the
        tiles of this share."""

        def visit(row):
            start, end = self.rows[0, row], self.rows[0, row + 1]
            begin, stop = jnp.maximum(self.begin, start), jnp.minimum(self.stop, end)
            pl.when(begin < stop)(lambda: body(row, start, begin, stop))

        @pl.when(self.begin < self.stop)
        def _():
            pl.loop(self.row_of(self.begin), self.row_of(self.stop - 1) + 1)(visit)

    def tiles_of(self, row):
        """Return a function that gives the `Tile` of the `j`-th tile of a row."""
        plan = self.plan
        ring, length = self.rows[1, row], self.rows[2, row]
        ring_tiles = pl.cdiv(ring, plan.tile)

        def tile(j):
            in_ring = j < ring_tiles
            place = jnp.where(in_ring, j, j - ring_tiles) * plan.tile
            stored = jnp.minimum(jnp.where(in_ring, ring, length) - place, plan.tile)
            return Tile(jnp.where(in_ring, 0, plan.ring_pages), place, stored)

        return tile


def _fetch(walk, table, pool, *, tiles, ready, free, **_):
    plan, page = walk.plan, walk.plan.page

    def row(row, start, begin, stop):
        tile_of = walk.tiles_of(row)

        def places(tile):
            """Return the first entry in the pool of each piece of a tile."""
            column, place, _ = tile_of(tile - start)

            def piece(at):
                of_table = jnp.minimum(column + lax.div(at, page), table.shape[1] - 1)
                of_pool = jnp.clip(table[row, of_table], 0, pool.shape[0] // page - 1)
                return of_pool * page + lax.rem(at, page)

            return tuple(piece(place + x * plan.piece) for x in range(plan.pieces))

        def fetch(tile, pieces):
            # Look up the next tile's places before anything waits.
            after = places(tile + 1)
            slot = lax.rem(tile - walk.begin, plan.stages)
            stored = tile_of(tile - start).stored
            plgpu.barrier_wait(free.at[slot])
            for x, piece in enumerate(pieces):
                first = x * plan.piece
                source = pool.at[pl.ds(pl.multiple_of(piece, 8), plan.piece)]
                entries = tiles.at[slot, pl.ds(first, plan.piece)]
                lax.cond(
                    first < stored,
                    functools.partial(plgpu.copy_gmem_to_smem, source, entries, ready.at[slot]),
                    functools.partial(plgpu.barrier_arrive, ready.at[slot]),
                )
            return after

        lax.fori_loop(begin, stop, fetch, places(begin))

    walk.each_row(row)
    for slot in range(plan.stages):
        plgpu.barrier_wait(free.at[slot])


def _work(
    walk, machine, program, q, slots, slot_lse, *,
    q_tile, o_tile, lse_tile, tiles, q_ready, ready, free,
):  # fmt: skip
    plan = walk.plan
    h, scale = plan.shares.h, plan.shares.scale
    copied = pl.ds(0, q.shape[1])

    def row(row, start, begin, stop):
        plgpu.copy_gmem_to_smem(q.at[row], q_tile.at[copied], q_ready)
        tile_of = walk.tiles_of(row)

        def tile(tile, state):
            m, l, acc = state
            slot = lax.rem(tile - walk.begin, plan.stages)
            stored = tile_of(tile - start).stored
            plgpu.barrier_wait(ready.at[slot])
            x = machine.scores(q_tile, tiles.at[slot, :, pl.ds(0, h)], lambda: None)
            key = machine.layout(lax.broadcasted_iota(jnp.int32, x.shape, 1), plgpu.Layout.WGMMA)
            x = jnp.where(key < stored, x * scale, MASKED)
            m_new = jnp.maximum(m, x.max(1))
            kept = jnp.exp2(m - m_new)
            p = jnp.exp2(x - lax.broadcast_in_dim(m_new, x.shape, (0,)))
            l = l * kept + p.sum(1)
            p = p.astype(q.dtype)
            acc *= lax.broadcast_in_dim(kept, acc.shape, (0,))

            @pl.when(stored < plan.keys)
            def _():
                # Entries that are not stored may be NaN, and 0 · NaN is NaN. One part at a time saves registers.
                for part in range(h, 2 * h, 64):
                    columns = pl.ds(part, 64)
                    v = machine.layout(tiles[slot, :, columns], plgpu.Layout.WGMMA)
                    entry = machine.layout(lax.broadcasted_iota(jnp.int32, v.shape, 0), plgpu.Layout.WGMMA)
                    tiles[slot, :, columns] = jnp.where(entry < stored, v, 0)
                plgpu.commit_smem()

            acc = machine.weighted(acc, p, tiles.at[slot, :, pl.ds(h, h)])
            plgpu.barrier_arrive(free.at[slot])
            return m_new, l, acc

        per_query = lambda x: machine.layout(jnp.full(QUERIES, x, jnp.float32), ROWS)  # noqa: E731
        acc = machine.layout(jnp.zeros((QUERIES, h), jnp.float32), plgpu.Layout.WGMMA)
        plgpu.barrier_wait(q_ready)
        m, l, acc = lax.fori_loop(begin, stop, tile, (per_query(MASKED), per_query(0), acc))
        # The buffers may still be copied out for the previous row.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        o_tile[...] = acc * lax.broadcast_in_dim(1 / l, acc.shape, (0,))
        lse_tile[...] = m + jnp.log(l) * LOG2E
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_tile.at[copied], slots.at[program + row])
        plgpu.copy_smem_to_gmem(lse_tile.at[copied], slot_lse.at[program + row])

    for slot in range(plan.stages):
        plgpu.barrier_arrive(free.at[slot])
    walk.each_row(row)
    plgpu.wait_smem_to_gmem(0)
