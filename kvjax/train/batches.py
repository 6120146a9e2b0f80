"""The rows of an update: the part that each process reads, and their placement on the mesh."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Int, Shaped

from kvjax.errors import UserError
from kvjax.mesh import BATCH, P

TokenRows = Int[np.ndarray, "b t"]
"""Rows that are sequences of tokens."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows that one process reads, of a step's `total`. They need not follow one another, since a mesh may order
    the devices of several TPU hosts in turn."""

    own: Int[np.ndarray, " b"]
    """The indices of this process's rows, ascending."""
    total: int
    """The number of rows of all processes."""
    group: int
    """The index of this part among the `groups` equal parts of a step."""

    @classmethod
    def of_this_process(cls, mesh: Mesh, total: int) -> "Rows":
        """Return the rows on this process's devices. Processes that split the same rows over `tensor` or `sequence` all
        read them."""
        parts: dict[int, set[int]] = {}
        for device, (part,) in NamedSharding(mesh, P(BATCH)).devices_indices_map((total,)).items():
            parts.setdefault(device.process_index, set()).update(range(*part.indices(total)))
        return cls.of_process(parts, jax.process_index(), total)

    @classmethod
    def of_process(cls, parts: Mapping[int, Collection[int]], process: int, total: int) -> "Rows":
        """Return the rows of a process, given those of every process. Raises UserError if these are not equal parts of
        the rows, each of one process or of several."""
        distinct = sorted({tuple(sorted(part)) for part in parts.values()})
        if any(len(part) * len(distinct) != total for part in distinct):
            raise UserError(
                f"--mesh gives {len(parts)} processes {len(distinct)} different parts of an update's {total} rows, "
                "which overlap or are not equal: choose another --mesh"
            )
        own = tuple(sorted(parts[process]))
        return cls(np.array(own), total, distinct.index(own))

    @property
    def count(self) -> int:
        return len(self.own)

    @property
    def groups(self) -> int:
        return self.total // self.count

    def within(self, part: slice) -> slice:
        """Return where a device's rows are among this process's own."""
        start, stop, _ = part.indices(self.total)
        first = int(np.searchsorted(self.own, start))
        return slice(first, first + stop - start)


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
            return array[rows.within(index[0])]

        spec = P(BATCH, *[None] * (array.ndim - 1))
        shape = (rows.total, *array.shape[1:])
        return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), part, dtype=array.dtype)

    return jax.tree.map(place, batch)


def from_mesh(rows: Rows, x: jax.Array) -> Shaped[np.ndarray, "b ..."]:
    """Return this process's own rows of an array that is split as `to_mesh` splits it."""
    result = np.empty((rows.count, *x.shape[1:]), x.dtype)
    for shard in x.addressable_shards:
        result[rows.within(shard.index[0])] = shard.data
    return result
