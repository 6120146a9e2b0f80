"""The walk of a GPU program over tiles, in Triton. Sizes of axes are powers of two, with a mask beyond an array's
end."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.softmax import LOG2E, MASKED
from pallas_kernels.vertical_slash.key_lists import Keys, pad, spans


class Blocks(NamedTuple):
    """The size of a tile of logits, `queries` of one head × `keys`, and the `warps` that share it."""

    queries: int
    keys: int
    warps: int


FORWARD = {
    "bfloat16": {64: Blocks(128, 64, 8), 128: Blocks(128, 64, 8), 256: Blocks(64, 32, 4)},
    "float32": {64: Blocks(64, 32, 8), 128: Blocks(32, 16, 8), 256: Blocks(32, 16, 8)},
}
"""The tiles that `ptxas` fits into an H100's registers without spilling, by dtype and head_dim (rounded up to a power
of two).

Exact float32 products consist of scalar products with their operands in registers, so their tiles are small.
"""


def blocks_of(sizes: dict[str, dict[int, Blocks]], t: int, h: int, dtype: Any) -> Blocks:
    """Return the blocks from `sizes`, a table like `FORWARD`, with at most as many queries as `t` needs."""
    blocks = sizes[jnp.dtype(dtype).name][max(64, pl.next_power_of_2(h))]
    return blocks._replace(queries=min(blocks.queries, max(16, pl.next_power_of_2(t))))


def load_rows(ref: Any, start: Any, size: int, begin: Any = 0, length: int | None = None) -> jax.Array:
    """Load rows `start` to `start + size` of the `length` rows from `begin` on.

    Rows beyond them are zeros, and so are columns up to a power of two.
    """
    row = start + jnp.arange(size)
    inside = row < (ref.shape[0] if length is None else length)
    row += begin
    if len(ref.shape) == 1:
        return plt.load(ref.at[row], mask=inside, other=0)
    column = jnp.arange(pl.next_power_of_2(ref.shape[1]))
    mask = inside[:, None] & (column < ref.shape[1])[None]
    return plt.load(ref.at[row[:, None], column[None]], mask=mask, other=0)


def store_rows(ref: Any, start: Any, x: jax.Array) -> None:
    """Store `x` in `ref` from row `start` on. Rows and columns beyond the end of `ref` are left out."""
    row = start + jnp.arange(x.shape[0])
    if len(ref.shape) == 1:
        plt.store(ref.at[row], x.astype(ref.dtype), mask=row < ref.shape[0])
        return
    column = jnp.arange(x.shape[1])
    mask = (row < ref.shape[0])[:, None] & (column < ref.shape[1])[None]
    plt.store(ref.at[row[:, None], column[None]], x.astype(ref.dtype), mask=mask)


class Walk(NamedTuple):
    """The walk of blocks of queries over `band`, if there is one, and `far`. `first` is the index of the first
    query."""

    far: Keys
    band: Keys | None
    blocks: Blocks
    first: int
    window: int
    """The size of the local window in tokens."""

    def operands(self, t: int, group: int) -> tuple[list[jax.Array], list[pl.BlockSpec]]:
        """Return the kernel's first operands, and their block specs for program `(query head, block)`."""
        bq, bk, _ = self.blocks
        far = pad(self.far, bk)
        first = self.first + bq * jnp.arange(pl.cdiv(t, bq))
        arrays: list[Any] = [jnp.stack(spans(far, bk, first, first + bq - 1), -1)]
        specs = [pl.BlockSpec((None, None, 3), lambda x, i: (x // group, i, 0))]
        for keys in (far,) if self.band is None else (far, self.band):
            arrays += [x for x in keys if x is not None]
        specs += [self._of_row(x, group) for x in arrays[1:]]
        return arrays, specs

    @staticmethod
    def _of_row(x: jax.Array, group: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *x.shape[1:]), lambda q, i: (q // group, *(0 for _ in x.shape[1:])))

    def split(self, refs: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Split a kernel's refs into the walk's operands and the kernel's own."""
        n = 1 + 4 + (self.far.log_gate is not None) + 4 * (self.band is not None)
        return refs[:n], refs[n:]

    def run(self, operands: Any, step: Callable[..., Any], state: Any) -> Any:
        """Run `state = step(k, v, mask, state)` over the tiles. `mask(x)` adds gates to the logits x and masks them."""
        bq, bk, _ = self.blocks
        gated = self.far.log_gate is not None
        span, *refs = operands
        far, band = refs[: 4 + gated], refs[4 + gated :]
        begin = self.first + pl.program_id(1) * bq
        index = begin + jnp.arange(bq)

        def tile(refs, masked, at, state):
            k, v, *marks = (load_rows(ref, at, bk) for ref in refs)

            def mask(x):
                if len(marks) == 3:
                    x += marks[2][None] * LOG2E
                if not masked:
                    return x
                seen = (index[:, None] >= marks[0][None]) & (index[:, None] < marks[1][None])
                return jnp.where(seen, x, MASKED)

            return step(k, v, mask, state)

        if band:
            # Entries beyond the last key are zeros with a stop of 0, so no query sees them.
            start = jnp.maximum(begin - self.window + 1, 0)
            count = pl.cdiv(begin + bq - start, bk)
            state = lax.fori_loop(0, count, lambda j, state: tile(band, True, start + j * bk, state), state)
        past, full, begun = (span[at] for at in range(3))
        full = jnp.maximum(past, full)
        state = lax.fori_loop(past, full, lambda j, state: tile(far, False, j * bk, state), state)
        return lax.fori_loop(full, begun, lambda j, state: tile(far, True, j * bk, state), state)
