"""An update's rows: which of them a process reads, and how they get onto the mesh."""

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
    """The rows `start … stop − 1` of a step's `total`: those that one process reads."""

    start: int
    """The first."""
    stop: int
    """Behind the last."""
    total: int
    """Of all processes."""

    @classmethod
    def of_this_process(cls, mesh: Mesh, total: int) -> "Rows":
        """The rows on this process's devices. Processes that share their rows over `tensor` or `sequence` read the same
        ones."""
        parts = NamedSharding(mesh, P(BATCH)).addressable_devices_indices_map((total,)).values()
        bounds = [part[0].indices(total) for part in parts if part is not None]
        return cls(min(b[0] for b in bounds), max(b[1] for b in bounds), total)

    @property
    def count(self) -> int:
        return self.stop - self.start

    @property
    def group(self) -> int:
        """Which of the `groups` equal parts of a step this is."""
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
    """Rows of the same shapes, pytrees of arrays, as one batch: [b …] of each array."""
    return jax.tree.map(lambda *x: np.stack(x), *rows)


def to_mesh(mesh: Mesh, rows: Rows, batch: Any) -> Any:
    """A step's arrays on the mesh, their rows split over (data, fsdp), from each process's own rows; what is on devices
    already stays as it is."""

    def place(own):
        if isinstance(own, jax.Array):
            return own

        def part(index):
            start, stop, _ = index[0].indices(rows.total)
            return own[start - rows.start : stop - rows.start]

        spec = P(BATCH, *[None] * (own.ndim - 1))
        shape = (rows.total, *own.shape[1:])
        return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), part, dtype=own.dtype)

    return jax.tree.map(place, batch)


def from_mesh(rows: Rows, x: jax.Array) -> Shaped[np.ndarray, "b ..."]:
    """This process's own rows of an array that is split as `to_mesh` splits it."""
    own = np.empty((rows.count, *x.shape[1:]), x.dtype)
    for shard in x.addressable_shards:
        start, stop, _ = shard.index[0].indices(rows.total)
        own[start - rows.start : stop - rows.start] = shard.data
    return own
