"""The walk of a TPU kernel's block of queries over the band and the far list.

Grid step `(r, i)` is block `i` of the queries of one (sequence, kv head), with the group's query heads in one tile. It
walks over the band from the first key of its window, then over the far list's prefix. Tiles of keys are fetched by
double-buffered copies; the last step of a block already fetches the next block's first tile.

Keys and values are read from the caller's arrays, whatever their number. Copies begin and end at multiples of the
lanes, so the last tile is moved back to end with the keys. If the keys do not end at a multiple of the lanes, their
last tile is a padded copy. If a block's band has padding, the padding of its tiles is zeroed as they arrive, since
0 · NaN is NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.softmax import LOG2E, MASKED
from pallas_kernels.vertical_slash.key_lists import Keys, pad, pad_marks, spans

LANES = 128


class Blocks(NamedTuple):
    """The size of a tile of logits: `queries` of each of a group's heads × `keys`."""

    queries: int
    keys: int


def blocks_of(group: int, t: int, s: int, dtype: Any, rows: int = 1024, most: int = 512) -> Blocks:
    """Return the size of tiles: about `rows` rows × `most` keys.

    Tiles have half as many logits in float32, whose exact products take more memory. More rows share each key that is
    read; more keys would waste work at the edges of the band.
    """
    queries = min(LANES * max(1, rows // LANES // group), pl.cdiv(t, LANES) * LANES)
    logits = 2 * rows * most // jnp.dtype(dtype).itemsize
    keys = max(1, logits // (group * queries) // LANES) * LANES
    return Blocks(queries, min(most, keys, pl.cdiv(s, LANES) * LANES))


def wide(x: jax.Array, n: int) -> jax.Array:
    """Widen `x` `[rows LANES]`, whose lanes are equal, to `[rows n]`."""
    return x[:, :n] if n <= LANES else jnp.tile(x, (1, pl.cdiv(n, LANES)))[:, :n]


def lane_sums(x: jax.Array) -> jax.Array:
    """Sum `x` `[rows n]` to `[rows LANES]`. The reduction across lanes is left for the end of a block."""
    return sum((x[:, c : c + LANES] for c in range(LANES, x.shape[1], LANES)), x[:, :LANES])


@dataclass(frozen=True)
class Walk:
    """The walk of `n` blocks of queries over `band`, if there is one, and `far`. `first` is the index of the first
    query.

    The queries, and the band's keys and values, may have more rows than the lists. The walk takes their rows from the
    prefetched `row` on.
    """

    far: Keys
    band: Keys | None
    blocks: Blocks
    n: int
    first: int
    window: int
    """The size of the local window in tokens."""

    row: Any = 0
    """The row of the queries, and of the band's keys and values, that corresponds to the lists' first row."""

    @property
    def gated(self) -> bool:
        return self.far.log_gate is not None

    @property
    def rows(self) -> int:
        return self.far.start.shape[0]

    def operands(self) -> tuple[list[jax.Array], list[pl.BlockSpec]]:
        """Return the kernel's first operands, and the block specs of all but the first one, which is prefetched."""
        bq, bk = self.blocks
        first = self.first + bq * jnp.arange(self.n)
        table = [*spans(pad_marks(self.far, bk), bk, first, first + bq - 1)]
        arrays = self._entries(self.far, 0)
        if self.band is not None:
            table.append(self._hidden(self.band))
            arrays += self._entries(self.band, self.row)
        table = jnp.stack(table, 1)
        specs = [pl.BlockSpec((None, *table.shape[1:]), lambda r, i, row: (r, 0, 0), memory_space=pltpu.SMEM)]
        row = jnp.full(1, self.row, jnp.int32)
        return [row, table, *arrays], specs + [pl.BlockSpec(memory_space=pl.ANY)] * len(arrays)

    def _entries(self, keys: Keys, row: Any) -> list[jax.Array]:
        """Return keys, values and the marks of each entry: start, stop and, if the far list has gates, the gate's bits.

        If the keys do not end at a multiple of the lanes, a last tile of keys and one of values follow. `row` is the
        first row that is walked.
        """
        bk = self.blocks.keys
        if keys.k.shape[1] < bk:
            keys = pad(keys, bk)
        k, v, start, stop, gate = pad_marks(keys, LANES)
        marks = [start, stop]
        if self.gated:
            gate = jnp.zeros_like(start, jnp.float32) if gate is None else gate * LOG2E
            marks.append(lax.bitcast_convert_type(gate, jnp.int32))
        (r, length), s = start.shape, k.shape[1]
        tail = []
        if s < length:
            corner, size = (row, length - bk, 0), (r, s + bk - length)
            tail = [lax.dynamic_slice(x, corner, (*size, x.shape[2])) for x in (k, v)]
            tail = [jnp.pad(x, ((0, 0), (0, length - s), (0, 0))) for x in tail]
        return [k, v, jnp.stack(marks, 1), *tail]

    def _hidden(self, band: Keys) -> jax.Array:
        """Return `[r i]`: 1 if the band's tiles of a block may hold keys that no query sees, else 0."""
        bq, bk = self.blocks
        hidden = jnp.pad(band.start >= band.stop, ((0, 0), (0, -band.start.shape[1] % bk)))
        hidden = hidden.reshape(self.rows, -1, bk).any(2)[:, None]
        tile = bk * jnp.arange(hidden.shape[2])
        query = (self.first + bq * jnp.arange(self.n))[:, None]
        # The last tile may be moved back, or end after the queries, by less than its size.
        near = (tile + 2 * bk > query - self.window) & (tile < query + bq + bk)
        return jnp.any(hidden & near, 2).astype(jnp.int32)

    def scratch(self) -> list[Any]:
        """Return the scratch of the walk, which follows the kernel's own."""
        bk, k, v = self.blocks.keys, self.far.k, self.far.v
        return [
            pltpu.VMEM((2, bk, k.shape[2]), k.dtype),
            pltpu.VMEM((2, bk, v.shape[2]), v.dtype),
            pltpu.VMEM((2, 3 if self.gated else 2, bk), jnp.int32),
            pltpu.SMEM((1,), jnp.int32),
            pltpu.SemaphoreType.DMA((2,)),
        ]

    def split(self, refs: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        """Split a kernel's refs into the walk's operands, the kernel's own, and the walk's scratch."""
        n = 2 + sum(self._refs())
        return refs[:n], refs[n:-5], refs[-5:]

    def _refs(self) -> list[int]:
        """Return the number of refs of each list."""
        lists = [x for x in (self.far, self.band) if x is not None]
        cut = [x.k.shape[1] > self.blocks.keys and x.k.shape[1] % LANES for x in lists]
        return [5 if x else 3 for x in cut]

    def run(self, operands: Any, scratch: Any, tile: Callable[..., None]) -> None:
        """Run `tile(k, v, mask)` for each tile in turn. `mask(x)` adds gates to the logits x and masks them."""
        bq, bk = self.blocks
        row_ref, table, *entries = operands
        far_refs = self._refs()[0]
        far, band = entries[:far_refs], entries[far_refs:]
        *buffers, slot_ref, semaphores = scratch
        row, block = pl.program_id(0), pl.program_id(1)

        def query(i):
            return self.first + i * bq

        def band_start(i):
            """Return the first key in the window of block `i`, rounded down to a multiple of the lanes."""
            return jnp.maximum(query(i) - self.window + 1, 0) // LANES * LANES

        def band_tiles(i):
            return pl.cdiv(jnp.minimum(query(i + 1), band[2].shape[2]) - band_start(i), bk) if band else 0

        def far_start(i, j):
            """Return the first entry of the `j`-th tile of block `i`, which is in the far list."""
            return (table[0, i] + j - band_tiles(i)) * bk

        def place(keys, begin):
            """Return where the tile at `begin` is read: the last tile is moved back to end with the keys."""
            return pl.multiple_of(jnp.minimum(begin, keys[2].shape[2] - bk), LANES)

        def copies(i, j, slot, act):
            """Run `act` on each copy that fetches the `j`-th tile of block `i`."""

            def bring(sources, *at):
                for x, buffer in zip(sources, buffers[:2], strict=True):
                    act(pltpu.make_async_copy(x.at[at], buffer.at[slot], semaphores.at[slot]))

            def each(keys, first_row, begin):
                k, v, marks, *tail = keys
                start = place(keys, begin)
                at = pl.ds(start, bk)
                act(pltpu.make_async_copy(marks.at[row, :, at], buffers[2].at[slot], semaphores.at[slot]))
                if not tail:
                    bring((k, v), first_row + row, at)
                    return
                last = start == marks.shape[2] - bk
                pl.when(last)(lambda: bring(tail, row, slice(None)))
                pl.when(~last)(lambda: bring((k, v), first_row + row, at))

            n_band = band_tiles(i)
            if band:

                @pl.when(j < n_band)
                def _():
                    each(band, row_ref[0], band_start(i) + j * bk)

            @pl.when(j >= n_band)
            def _():
                each(far, 0, far_start(i, j))

        def visit(slot, masked, duplicates=0):
            """Run `tile` on the tile in `slot`. Its first `duplicates` entries have been seen before."""
            k, v, marks = (buffer[slot] for buffer in buffers)

            def mask(x):
                if self.gated:
                    x += lax.bitcast_convert_type(marks[2:3], jnp.float32)
                if not masked:
                    return x
                group = x.shape[0] // bq
                index = lax.broadcasted_iota(jnp.int32, (group, bq, bk), 1).reshape(group * bq, bk)
                start, stop = marks[0:1] - query(block), marks[1:2] - query(block)
                start = jnp.where(lax.broadcasted_iota(jnp.int32, (1, bk), 1) < duplicates, bq, start)
                return jnp.where((index >= start) & (index < stop), x, MASKED)

            tile(k, v, mask)

        def clean(slot):
            """Zero the keys and values in `slot` that no query sees."""
            marks = buffers[2][slot]
            is_seen = (marks[0:1] < marks[1:2]).astype(jnp.float32)
            is_seen = jnp.broadcast_to(is_seen, (LANES, bk)).T
            for x in buffers[:2]:
                entries = x[slot].astype(jnp.float32)
                x[slot] = jnp.where(wide(is_seen, x.shape[2]) > 0, entries, 0).astype(x.dtype)

        n_band = band_tiles(block)
        past, full, begun = (table[at, block] for at in range(3))
        n = n_band + begun - past

        def step(j, slot):
            more = j + 1 < n

            @pl.when(more | (block + 1 < self.n))
            def _():
                i, j_next = jnp.where(more, block, block + 1), jnp.where(more, j + 1, 0)
                copies(i, j_next, 1 - slot, lambda copy: copy.start())

            copies(block, j, slot, lambda copy: copy.wait())
            if band:

                @pl.when(j < n_band)
                def _():
                    begin = band_start(block) + j * bk
                    pl.when(table[3, block] > 0)(lambda: clean(slot))
                    visit(slot, True, begin - place(band, begin))

            no_mask = past + j - n_band < full

            @pl.when((j >= n_band) & no_mask)
            def _():
                visit(slot, False)

            @pl.when((j >= n_band) & ~no_mask)
            def _():
                begin = far_start(block, j)
                visit(slot, True, begin - place(far, begin) if far[2].shape[2] % bk else 0)

            return 1 - slot

        @pl.when(block == 0)
        def _():
            slot_ref[0] = 0

        # Without a band a row may have nothing to walk over. This then holds for all of its blocks.
        @pl.when((block == 0) & (n > 0))
        def _():
            copies(0, 0, 0, lambda copy: copy.start())

        slot_ref[0] = lax.fori_loop(0, n, step, slot_ref[0])
