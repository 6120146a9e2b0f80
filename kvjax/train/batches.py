"""The rows of an update: the part that each process reads, and their placement on the mesh."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Int, Shaped

from kvjax.mesh import BATCH, P

TokenRows = Int[np.ndarray, "b t"]
"""Rows that are sequences of tokens."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows `start … stop − 1` that one process reads, of a step's `total`."""

    start: int
    stop: int
    total: int
    """The number of rows of all processes."""

    @classmethod
    def of_this_process(cls, mesh: Mesh, total: int) -> "Rows":
        """Return the rows on this process's devices. Processes that split the same rows over `tensor` or `sequence` all
        read them."""
        parts = NamedSharding(mesh, P(BATCH)).addressable_devices_indices_map((total,)).values()
        bounds = [part[0].indices(total) for part in parts if part is not None]
        return cls(min(b[0] for b in bounds), max(b[1] for b in bounds), total)

    @property
    def count(self) -> int:
        return self.stop - self.start

    @property
    def group(self) -> int:
        """The index of this part among the `groups` equal parts of a step."""
        return self.start // self.count

    @property
    def groups(self) -> int:
        return self.total // self.count


@runtime_checkable
class HeldRows(Protocol):
    """Held-out rows, read as they are needed."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice) -> Any: ...


def stack(rows: Sequence[Any]) -> Any:
    """Stack rows, pytrees of arrays of the same shapes, into one batch of arrays [b …]."""
    return jax.tree.map(lambda *x: np.stack(x), *rows)


def to_mesh(mesh: Mesh, rows: Rows, batch: Any) -> Any:
    """Place a step's arrays on the mesh, from each process's own rows, which are split over (data, fsdp). Arrays that
    are on devices already stay as they are."""

    def place(array):
        if isinstance(array, jax.Array):
            return array

        def part(index):
            start, stop, _ = index[0].indices(rows.total)
            return array[start - rows.start : stop - rows.start]

        spec = P(BATCH, *[None] * (array.ndim - 1))
        shape = (rows.total, *array.shape[1:])
        return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), part, dtype=array.dtype)

    return jax.tree.map(place, batch)


def from_mesh(rows: Rows, x: jax.Array) -> Shaped[np.ndarray, "b ..."]:
    """Return this process's own rows of an array that is split as `to_mesh` splits it."""
    result = np.empty((rows.count, *x.shape[1:]), x.dtype)
    for shard in x.addressable_shards:
        start, stop, _ = shard.index[0].indices(rows.total)
        result[start - rows.start : stop - rows.start] = shard.data
    return result
