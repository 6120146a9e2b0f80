"""`paged_decode` on TPU: pages are copied from HBM ahead of the arithmetic, over all rows without a pause.

A row is one (sequence, kv head); its query heads and tokens are the rows of one tile. Its stored pages form one list,
first the ring's, then the global ones, which is read a block at a time. A cursor runs `SLOTS − 1` blocks ahead of the
arithmetic, across the ends of rows, and starts the copies of its block. Page tables are copied to scalar memory ahead
of the cursor. Only pages that hold entries are copied.

Within a long row, the arithmetic of a full block and the copies of another full block form a run of instructions
without branches, so that copies start during the arithmetic. Only the part of another block that holds entries is
computed (`EIGHTHS`), with zeros for values that are not stored, since 0 · NaN is NaN. Neither this arithmetic nor the
start of the first copies has branches, so a short row takes little more than its own latencies.

A page's biases and scales are copied with it, as the row of lanes that contains them or as all their rows. A row of
lanes that contains those of several pages is rotated until they line up with their logits.
"""

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.blocks import divisor
from pallas_kernels.choose import target
from pallas_kernels.int8_entries import scales
from pallas_kernels.interpret import tpu_interpret
from pallas_kernels.paged_decode.chunked import TOKENS, attend_many
from pallas_kernels.paged_decode.plane import LANES, in_lanes
from pallas_kernels.paged_decode.supported import check_supported
from pallas_kernels.paged_decode.tpu_append import append_tokens, tile_entries
from pallas_kernels.softmax import LOG2E, MASKED
from pallas_kernels.supported import require
from pallas_kernels.varying import output
from pallas_kernels.vertical_slash.tpu import attend

SLOTS = 4
"""Blocks in VMEM: one in use, and the others in flight."""
TABLES = 4
"""Rows of the page table in SMEM."""
BLOCK_BYTES = 1 << 19
"""The approximate size of a block in bytes: three blocks in flight cover the latency of HBM."""
LOGITS = 1 << 15
"""The most logits of a tile: half of the vector registers."""
OVERLAPPED = 8
"""The most copies that are started during the arithmetic of a block that is not full. Each takes scalar instructions,
whether it is needed or not."""
GROUP = 8
"""The number of the block's other copies that are started together."""
EIGHTHS = 2, 3, 4, 8
"""The parts of a block that may be computed if it is not full, in eighths. The least part with all entries is used."""
STEP_ROWS = 128
"""The most rows that share a grid step, which has a fixed cost in instructions."""
STEP_BYTES = 1 << 22
"""The most bytes of the queries and outputs of a step's rows. VMEM holds those of two steps."""
COLUMNS = 49152
"""The most columns of a page table. `TABLES` rows of this length fill three quarters of SMEM."""
TILE = 1 << 16
"""The most logits of a tile with the smallest possible block."""
CURSOR = ROW, BLOCK, TAKEN = range(3)
"""The cursor: row and index of the next block to fetch, and the number of blocks that the arithmetic has used, which is
`SLOTS − 1` less than the number of fetched blocks."""


class _Sizes(NamedTuple):
    """The compile-time constants of the kernel. `block`: the pages of a block; `rows`: the rows of one core."""

    page: int
    block: int
    ring_pages: int
    t: int
    scale: float
    precision: lax.Precision | None
    rows: int


def _ceil_div(count, size: int):
    """Return `count` ≥ 0 divided by `size`, rounded up, by a shift if `size` is a power of two."""
    if size & (size - 1):
        return pl.cdiv(count, size)
    return (count + (size - 1)) >> (size.bit_length() - 1)


def _block_pages(page: int, columns: int, entry_bytes: int, queries: int) -> int:
    """Return the pages of a block: whole vectors of logits, and no more pages than a row needs."""
    keys = min(1024, BLOCK_BYTES // entry_bytes, LOGITS // (-(-queries // 8) * 8), columns * page)
    whole = math.lcm(page, LANES)
    return max(1, -(-keys // whole)) * whole // page


def _kernel(*refs, sizes: _Sizes):
    ring_ref, length_ref, q_ref, new_ref, pool_ref, table_ref, bias_ref, scale_ref, o_ref, lse_ref = refs[:10]
    buffers, tables, cursor, page_sems, table_sems, bias_scratch, scale_scratch = refs[10:]
    planes = [
        (ref, scratch) for ref, scratch in ((bias_ref, bias_scratch), (scale_ref, scale_scratch)) if scratch
    ]
    page, block, columns = sizes.page, sizes.block, table_ref.shape[2]
    step_rows, queries, width = q_ref.shape
    # Only parts that are whole vectors of logits are used.
    parts = [block * x // 8 for x in EIGHTHS if block * x % 8 == 0 and block * x // 8 * page % LANES == 0]
    step = pl.program_id(1)
    first_row = pl.program_id(0) * sizes.rows
    last_row = first_row + sizes.rows

    def pages_of(row):
        """Return the number of pages that hold entries, in the ring and in total."""
        ring = _ceil_div(ring_ref[row], page)
        return ring, ring + _ceil_div(length_ref[row], page)

    def table_copy(row):
        slot = (row - first_row) & (TABLES - 1)
        place = tables.at[pl.ds(pl.multiple_of(slot * columns, LANES), columns)]
        return pltpu.make_async_copy(table_ref.at[row, 0], place, table_sems.at[slot])

    def fetch_numbers(plane_ref, scratch, page_index, slot, p):
        """Start the copy of a plane's numbers for page `p` of a block."""
        rows, places, sems = scratch
        count = rows.shape[1] // block
        offset = page_index * page
        places[slot * block + p] = offset
        source = plane_ref.at[pl.ds(lax.div(offset, LANES), count)]
        pltpu.make_async_copy(source, rows.at[slot, pl.ds(p * count, count)], sems.at[slot]).start()

    def numbers_of(scratch, slot, part):
        """Return a plane's numbers `[1 keys]` for the first `part` pages of a block that has arrived."""
        rows, places, _ = scratch
        if page >= LANES:
            return jnp.concatenate([rows[slot, i] for i in range(part * rows.shape[1] // block)], 1)
        lane = lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
        lines = []
        for first in range(0, part, LANES // page):
            line = jnp.zeros((1, LANES), rows.dtype)
            for p in range(LANES // page):
                turn = (p * page - places[slot * block + first + p]) & (LANES - 1)
                turned = pltpu.roll(rows[slot, first + p], turn, 1)
                line = jnp.where(lane >= p * page, turned, line)
            lines.append(line)
        return jnp.concatenate(lines, 1)

    def start(slot, p, page_index):
        """Start the copies of page `p` of a block."""
        source = pool_ref.at[page_index]
        pltpu.make_async_copy(source, buffers.at[slot, p], page_sems.at[slot]).start()
        for plane_ref, scratch in planes:
            fetch_numbers(plane_ref, scratch, page_index, slot, p)

    def start_all(slot, column, p, count):
        """Start the copies of `count` pages, from page `p` on. The block begins at `column` in the tables."""
        for i in range(count):
            start(slot, p + i, tables[column + p + i])

    def wait_for_pages(slot, count):
        """Wait for the bytes of `count` pages. `count` is static."""
        pages = buffers.at[slot, pl.ds(0, count)]
        pltpu.make_async_copy(pages, pages, page_sems.at[slot]).wait()
        for _, (rows, _, sems) in planes:
            rows = rows.at[slot, pl.ds(0, count * (rows.shape[1] // block))]
            pltpu.make_async_copy(rows, rows, sems.at[slot]).wait()

    def await_pages(slot, count):
        """Wait for the first `count` pages of a block, one power of two at a time."""
        for size in reversed([1 << x for x in range(block.bit_length())]):
            pl.when((count & size) > 0)(functools.partial(wait_for_pages, slot, size))

    def column_of(row, index):
        """Return the index in the tables at which block `index` of a row begins."""
        begin = ((row - first_row) & (TABLES - 1)) * columns
        return begin + sizes.ring_pages - pages_of(row)[0] + index * block

    def advance():
        """Advance the cursor. Return where its previous block begins in the tables, and the pages of the block to
        fetch."""
        row, index = jnp.minimum(cursor[ROW], last_row - 1), cursor[BLOCK]
        in_range = cursor[ROW] < last_row
        entered = in_range & (index == 0)
        pl.when(entered)(lambda: table_copy(row).wait())
        pl.when(entered & (row + TABLES - 1 < last_row))(lambda: table_copy(row + TABLES - 1).start())
        remaining = jnp.where(in_range, pages_of(row)[1] - index * block, 0)
        more = remaining > block
        cursor[BLOCK] = jnp.where(more, index + 1, 0)
        cursor[ROW] = jnp.where(in_range & jnp.logical_not(more), row + 1, cursor[ROW])
        return column_of(row, index), jnp.minimum(remaining, block)

    overlapped = min(OVERLAPPED, block)

    def start_first(slot, column, count):
        """Start the copies of the first pages of a block, without branches."""
        for p in range(overlapped):
            # The index is read even if it is not needed, and even past the row's end, where another row's table may be
            # arriving. Only the copy depends on the count.
            pl.when(p < count)(functools.partial(start, slot, p, tables[column + p]))

    def start_rest(slot, column, count):
        """Start the copies of the other pages, all at once or a few at a time."""
        if overlapped == block:
            return

        def start_full():
            start_all(slot, column, overlapped, block - overlapped)

        def start_part():
            groups = (count - overlapped) >> (GROUP.bit_length() - 1)
            end = overlapped + groups * GROUP
            lax.fori_loop(
                0, groups, lambda i, _: start_all(slot, column, overlapped + i * GROUP, GROUP), None
            )
            lax.fori_loop(end, count, lambda p, _: start_all(slot, column, p, 1), None)

        pl.when(count > overlapped)(lambda: lax.cond(count == block, start_full, start_part))

    def blank(slot, p, stored):
        """Zero the values of page `p` of a block beyond its first `stored` entries."""
        x = buffers[slot, p, :, -width:]
        place = lax.broadcasted_iota(jnp.int32, x.shape, 0)
        buffers[slot, p, :, -width:] = jnp.where(place < stored, x, jnp.zeros_like(x))

    @pl.when(step == 0)
    def _():
        cursor[ROW] = first_row
        cursor[BLOCK] = 0
        cursor[TAKEN] = 0
        for i in range(TABLES - 1):
            pl.when(first_row + i < last_row)(lambda i=i: table_copy(first_row + i).start())

        def fetch(slot, _):
            column, count = advance()
            start_first(slot, column, count)
            start_rest(slot, column, count)

        lax.fori_loop(0, SLOTS - 1, fetch, None)

    def attend(i, taken):
        row = first_row + step * step_rows + i
        ring, pages = pages_of(row)
        stored_first = jnp.where(ring > 0, ring_ref[row] - (ring - 1) * page, page)
        entries = ring * page + length_ref[row]
        q = q_ref[i]

        def seen(slot, index, state, part, whole=False):
            """Return the state after the first `part` pages of a block that has arrived. All pages of a `whole` block
            are full."""
            m, l, o = state
            kv = buffers[slot, :part].reshape(part * page, buffers.shape[3]).astype(q.dtype)
            x = lax.dot_general(
                q,
                kv[:, :width],
                (((1,), (1,)), ((), ())),
                precision=sizes.precision,
                preferred_element_type=jnp.float32,
            )
            x *= sizes.scale
            value_scale = None
            if scale_scratch:
                key_scale, value_scale = scales(numbers_of(scale_scratch, slot, part))
                x *= key_scale
            if bias_scratch:
                place = index * block * page + lax.broadcasted_iota(jnp.int32, x.shape, 1)
                x += jnp.where(place >= ring * page, numbers_of(bias_scratch, slot, part) * LOG2E, 0)
            v = kv[:, -width:]
            if not whole:
                place = index * block * page + lax.broadcasted_iota(jnp.int32, x.shape, 1)
                stored = (place < entries) & ((place < stored_first) | (place >= page))
                x = jnp.where(stored, x, MASKED)
                if value_scale is None:
                    v = v.reshape(part, page, width)
                    v = jnp.concatenate([jnp.where(index * block + p < pages, v[p], 0) for p in range(part)])
                else:
                    value_scale = jnp.where(stored, value_scale, 0)
            m_new = jnp.maximum(m, x.max(1, keepdims=True))
            p = jnp.exp2(x - m_new)
            kept = jnp.exp2(m - m_new)
            l = l * kept + sum(p[:, c : c + LANES] for c in range(0, part * page, LANES))
            weight = p if value_scale is None else p * value_scale
            pv = lax.dot_general(
                weight.astype(kv.dtype),
                v,
                (((1,), (0,)), ((), ())),
                precision=sizes.precision,
                preferred_element_type=jnp.float32,
            )
            return m_new, l, o * kept + pv

        # A row without pages takes one block, too.
        blocks = jnp.maximum(_ceil_div(pages, block), 1)
        # Up to this block, the block to fetch is neither the row's last nor another row's.
        steady = blocks - SLOTS

        def long(index, taken, state):
            """Process the full blocks from `index` on during which full blocks are fetched."""
            begin = jnp.where((index > 0) | (stored_first == page), index, steady)
            count = jnp.maximum(steady - begin, 0)
            column = column_of(row, begin + SLOTS - 1)

            def process(i, state):
                slot = (taken + i) & (SLOTS - 1)
                wait_for_pages(slot, block)
                start_all((taken + i + SLOTS - 1) & (SLOTS - 1), column + i * block, 0, block)
                return seen(slot, begin + i, state, block, whole=True)

            state = lax.fori_loop(0, count, process, state)

            cursor[BLOCK] += count
            return index + count, taken + count, state

        def tile(carry):
            index, taken, state = lax.cond(carry[0] < steady, long, lambda *x: x, *carry)
            slot = taken & (SLOTS - 1)
            free = (taken + SLOTS - 1) & (SLOTS - 1)
            column, count = advance()
            start_rest(free, column, count)
            left = jnp.minimum(pages - index * block, block)
            await_pages(slot, left)

            def of_part(part, state):
                if not scale_scratch:  # Integers times a scale of 0 are 0.
                    if sizes.ring_pages:
                        blank(slot, 0, jnp.where(index == 0, stored_first, page))
                    last = jnp.maximum(jnp.minimum(left, part) - 1, 0)
                    blank(slot, last, entries - (index * block + last) * page)
                state = seen(slot, index, state, part)
                start_first(free, column, count)
                return state

            which = sum((left > part).astype(jnp.int32) for part in parts[:-1])
            branches = [functools.partial(of_part, part) for part in parts]
            return index + 1, taken + 1, lax.switch(which, branches, state)

        state = _start(q, None if new_ref is None else new_ref[i], sizes)
        begin = jnp.int32(0), taken, state
        _, taken, (m, l, o) = lax.while_loop(lambda carry: carry[0] < blocks, tile, begin)
        l = l.sum(1, keepdims=True)
        empty = m <= MASKED / 2
        l = jnp.where(empty, 1, l)
        o_ref[i] = jnp.where(empty, 0, o / l).astype(o_ref.dtype)
        lse = jnp.where(empty, -jnp.inf, m * math.log(2) + jnp.log(l))
        across = lax.broadcasted_iota(jnp.int32, (queries, queries), 1)
        diagonal = lax.broadcasted_iota(jnp.int32, (queries, queries), 0) == across
        lse_ref[i] = jnp.where(diagonal, lse, 0).sum(0, keepdims=True)
        return taken

    cursor[TAKEN] = lax.fori_loop(0, step_rows, attend, cursor[TAKEN])


def _start(q, new, sizes: _Sizes):
    """Return the state after this call's keys. A query sees the keys up to its own."""
    queries, width = q.shape
    m = jnp.full((queries, 1), MASKED, jnp.float32)
    if new is None:
        return m, jnp.zeros((queries, LANES), jnp.float32), jnp.zeros((queries, width), jnp.float32)
    q, new = q.astype(jnp.float32), new.astype(jnp.float32)
    token = lax.broadcasted_iota(jnp.int32, m.shape, 0) % sizes.t
    logits = []
    for j in range(sizes.t):
        x = (q * new[j : j + 1, :width]).sum(1, keepdims=True) * sizes.scale
        logits.append(jnp.where(token >= j, x, MASKED))
    m = functools.reduce(jnp.maximum, logits)
    p = [jnp.exp2(x - m) for x in logits]
    # The lanes of the sum are added up at the end.
    first_lane = lax.broadcasted_iota(jnp.int32, (queries, LANES), 1) == 0
    l = jnp.where(first_lane, sum(p), 0.0)
    return m, l, sum(x * new[j : j + 1, -width:] for j, x in enumerate(p))


def _cores(rows: int) -> int:
    """Return the number of cores that share the rows: two if a device has two cores and the number of rows is even."""
    return math.gcd(rows, pltpu.get_tpu_info().num_cores) if target().platform == "tpu" else 1


def tpu(
    q, pool, page_table, length, ring_length, ring_pages, new, bias, scale, dtype, append=None,
    interpret: Any = None,
):  # fmt: skip
    check_supported("tpu", q, pool, page_table, page_multiple=tile_entries(pool.dtype), columns=COLUMNS)
    if q.shape[2] > TOKENS:
        many = functools.partial(attend, dtype=jnp.float32, interpret=interpret)
        stored = q, pool, page_table, length, ring_length, ring_pages, new, bias, scale
        return attend_many(many, "tpu", *stored, dtype, append)
    b, n, t, h = q.shape
    heads, columns = page_table.shape[1:]
    capacity, page = pool.shape[:2]
    r, queries, entry_bytes = b * heads, n // heads * t, pool.dtype.itemsize * 2 * h
    least, keys = math.lcm(page, LANES), BLOCK_BYTES // entry_bytes
    limit = f"at most {TILE // least} queries of a kv head, tokens × query heads, at this page size, not {queries}"
    require(
        "paged_decode",
        "tpu",
        (
            least <= keys,
            f"pages of entries whose least common multiple with {LANES} is at most {keys}, not {page}",
        ),
        (queries * least <= TILE, limit),
        (
            (bias is None and scale is None) or page % LANES == 0 or LANES % page == 0,
            f"a bias or scales of pages of a divisor or a multiple of {LANES} entries, not {page}",
        ),
    )
    cores = _cores(r)
    # Keys and values are sliced out of entries only at whole lanes. Otherwise both products are as wide as an entry: q
    # is padded with zeros for the values, and half of the output is not used.
    width = h if h % LANES == 0 else 2 * h
    row_bytes = queries * width * (q.dtype.itemsize + jnp.dtype(dtype).itemsize)
    step_rows = divisor(r // cores, min(STEP_ROWS, STEP_BYTES // row_bytes))
    steps = r // cores // step_rows
    ring = jnp.zeros(b, jnp.int32) if ring_length is None else ring_length
    # The ring's columns are reversed, so that the used ones end where the global columns begin.
    table = jnp.concatenate([page_table[..., :ring_pages][..., ::-1], page_table[..., ring_pages:]], -1)
    table = jnp.clip(table.reshape(r, 1, columns), 0, capacity - 1)
    sizes = _Sizes(
        page=page,
        block=_block_pages(page, columns, entry_bytes, queries),
        ring_pages=ring_pages,
        t=t,
        scale=h**-0.5 * LOG2E,
        precision=lax.Precision.HIGHEST if q.dtype == jnp.float32 else None,
        rows=r // cores,
    )

    def plane_scratch(plane):
        """Return the scratch for a plane: rows of lanes of a block's pages, and where in the plane each page begins."""
        if plane is None:
            return []
        return [
            pltpu.VMEM((SLOTS, sizes.block * max(1, page // LANES), 1, LANES), plane.dtype),
            pltpu.SMEM((SLOTS * sizes.block,), jnp.int32),
            pltpu.SemaphoreType.DMA((SLOTS,)),
        ]

    planes = [None if plane is None else in_lanes(plane)[:, None] for plane in (bias, scale)]

    def per_row(*shape):
        return pl.BlockSpec((step_rows, *shape), lambda core, step, *_: (core * steps + step, 0, 0))

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    o, lse = pl.pallas_call(
        functools.partial(_kernel, sizes=sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(cores, steps),
            in_specs=[
                per_row(queries, width),
                None if new is None else per_row(t, 2 * h),
                anywhere,
                anywhere,
                *(None if plane is None else anywhere for plane in planes),
            ],
            out_specs=[per_row(queries, width), per_row(1, queries)],
            scratch_shapes=[
                pltpu.VMEM((SLOTS, sizes.block, page, 2 * h), pool.dtype),
                pltpu.SMEM((TABLES * (columns + -columns % LANES) + OVERLAPPED,), jnp.int32),
                pltpu.SMEM((len(CURSOR),), jnp.int32),
                pltpu.SemaphoreType.DMA((SLOTS,)),
                pltpu.SemaphoreType.DMA((TABLES,)),
                *map(plane_scratch, planes),
            ],
        ),
        out_shape=[output((r, queries, width), dtype, q), output((r, 1, queries), jnp.float32, q)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), disable_bounds_checks=True
        ),
        interpret=tpu_interpret(interpret),
        name="paged_decode",
    )(
        jnp.broadcast_to(ring[:, None], (b, heads)).reshape(r),
        length.reshape(r),
        jnp.pad(q.reshape(r, queries, h), ((0, 0), (0, 0), (0, width - h))),
        None if new is None else jnp.concatenate(new, -1).astype(q.dtype).reshape(r, t, 2 * h),
        pool,
        jnp.pad(table, ((0, 0), (0, 0), (0, -columns % LANES))),
        *planes,
    )
    o, lse = o[..., width - h :].reshape(b, n, t, h), lse.reshape(b, n, t)
    return o, lse, append_tokens(pool, append, new, lse, interpret)
