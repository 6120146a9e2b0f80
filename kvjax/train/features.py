"""Features of contexts and a teacher's targets for them, stored on disk or in memory for training.

Arrays are position-major, [positions, layers, …], so that an update reads a position from one place. On disk each
context is a folder, which is written once and atomically. `manifest.json` says what the features were computed from.
"""

import contextlib
import dataclasses
import functools
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Shaped

from kvjax.errors import UserError, shown_bytes
from kvjax.files import partial_folder
from kvjax.train.batches import Rows
from kvjax.train.precomputed import (
    check_disk_space,
    check_manifest,
    explain_disk_errors,
    write_manifest,
)

VERSION = 1
"""The version of the layout on disk."""
HELD_OUT_EVERY = 100
"""The first of every 100 positions is held out."""

Arrays = Mapping[str, Shaped[np.ndarray, "n ..."]]
"""The arrays of a context's positions, by name."""


@dataclasses.dataclass(frozen=True)
class PositionLayout:
    """The arrays that are stored for each position."""

    arrays: Mapping[str, tuple[tuple[int, ...], Any]]
    """The shape and dtype of each array, by name."""

    @property
    def bytes(self) -> int:
        """The bytes of a position."""
        return sum(int(np.prod(shape)) * jnp.dtype(dtype).itemsize for shape, dtype in self.arrays.values())


class MemoryStore:
    """The features of contexts in the host's memory."""

    def __init__(self, layout: PositionLayout, sizes: Sequence[int]):
        self.layout, self.sizes = layout, tuple(sizes)
        self._kept: dict[int, Arrays] = {}

    @property
    def finished(self) -> set[int]:
        """The indices of the contexts that are complete."""
        return set(self._kept)

    @property
    def plan(self) -> str:
        """A text that says how large the features are and where they are."""
        return f"{shown_bytes(sum(self.sizes) * self.layout.bytes)} of the host's memory"

    @contextlib.contextmanager
    def writing(self, index: int) -> Iterator[dict[str, np.ndarray]]:
        """Yield a context's arrays to be filled. The context is finished once the block ends without an error."""
        count = self.sizes[index]
        arrays = {
            name: np.zeros((count, *shape), dtype) for name, (shape, dtype) in self.layout.arrays.items()
        }
        yield arrays
        self._kept[index] = arrays

    def read(self) -> "Features":
        """Return the features of all contexts, one after another."""
        return Features([self._kept[index] for index in range(len(self.sizes))])


class FolderStore:
    """The features of contexts in a folder.

    Args:
        manifest: what the features are computed from. The fingerprint in its `made_for` may be that of the same weights
            in another dtype.

    Raises:
        UserError: the folder holds features of another model, of other data or options, or of another version; or the
            disk has no space for the missing features.
    """

    def __init__(
        self, folder: Path, layout: PositionLayout, sizes: Sequence[int], manifest: Mapping[str, Any]
    ):
        self.folder, self.layout, self.sizes = folder, layout, tuple(sizes)
        arrays = {name: [list(shape), jnp.dtype(x).name] for name, (shape, x) in layout.arrays.items()}
        expected = {"version": VERSION, **manifest, "arrays": arrays, "positions": list(sizes)}
        check_manifest(folder, expected, "these targets", "--targets")
        finished = self.finished  # looks at every folder
        missing = [n for index, n in enumerate(self.sizes) if index not in finished]
        remedy = "train on fewer contexts, or name a folder elsewhere (--targets)"
        description = f"the targets of {sum(missing)} positions"
        check_disk_space(folder, sum(missing) * layout.bytes, description, remedy)
        if jax.process_index() == 0:
            with self._explain_disk_errors():
                write_manifest(folder, expected)

    @property
    def finished(self) -> set[int]:
        """The indices of the contexts that are complete."""
        return {index for index in range(len(self.sizes)) if self._context_folder(index).is_dir()}

    @property
    def plan(self) -> str:
        """A text that says how large the features are and where they are."""
        return f"{shown_bytes(sum(self.sizes) * self.layout.bytes)} in {self.folder}"

    @contextlib.contextmanager
    def writing(self, index: int) -> Iterator[dict[str, np.ndarray]]:
        """Yield a context's arrays to be filled. They are moved into place once the block ends without an error. Of
        several processes all fill arrays, and only those of the first are stored.

        Raises:
            UserError: the disk fills up.
        """
        count = self.sizes[index]
        if jax.process_index() > 0:
            yield {name: np.zeros((count, *x), dtype) for name, (x, dtype) in self.layout.arrays.items()}
            return
        with self._explain_disk_errors(), partial_folder(self._context_folder(index)) as partial:
            arrays = {
                name: _allocate(partial / f"{name}.npy", (count, *shape), dtype)
                for name, (shape, dtype) in self.layout.arrays.items()
            }
            yield arrays
            for x in arrays.values():
                x.flush()
            try:
                partial.rename(self._context_folder(index))
            except OSError:
                if not self._context_folder(
                    index
                ).is_dir():  # another run that shares the folder may have been faster
                    raise

    def read(self) -> "Features":
        """Return the features of all contexts, one after another, mapped into memory."""

        def mapped(index: int, name: str, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
            file = self._context_folder(index) / f"{name}.npy"
            try:
                x = np.load(file, mmap_mode="r").view(jnp.dtype(dtype))
            except (OSError, ValueError) as error:
                raise UserError(
                    f"{file}: is missing or damaged ({error}): remove {self._context_folder(index)} and go on"
                ) from None
            if x.shape != (self.sizes[index], *shape):
                raise UserError(f"{file}: is damaged: remove {self._context_folder(index)} and go on")
            return x

        return Features(
            [
                {
                    name: mapped(index, name, dtype, shape)
                    for name, (shape, dtype) in self.layout.arrays.items()
                }
                for index in range(len(self.sizes))
            ]
        )

    def _context_folder(self, index: int) -> Path:
        return self.folder / f"{index:05}"

    def _explain_disk_errors(self) -> contextlib.AbstractContextManager[None]:
        return explain_disk_errors(
            self.folder, lambda: f"{len(self.finished)} of {len(self.sizes)} contexts are"
        )


def _allocate(file: Path, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return a new .npy file mapped into memory. bfloat16 is stored as uint16. The file's space is allocated at once:
    otherwise the process is killed if the disk is full while the mapped file is filled."""
    target = jnp.dtype(dtype)
    stored = target if target.isbuiltin == 1 else np.dtype(np.uint16)
    mapped = np.lib.format.open_memmap(file, mode="w+", dtype=stored, shape=shape)
    with file.open("rb+") as opened:
        os.posix_fallocate(opened.fileno(), 0, os.fstat(opened.fileno()).st_size)
    return mapped.view(target)


class Features:
    """The positions of contexts, one context after another."""

    def __init__(self, contexts: Sequence[Arrays]):
        self._contexts = contexts
        self._ends = np.cumsum([len(next(iter(arrays.values()))) for arrays in contexts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def training(self) -> Int[np.ndarray, " n"]:
        """The positions that are trained on."""
        positions = np.arange(len(self))
        return positions[positions % HELD_OUT_EVERY != 0]

    @property
    def held_out(self) -> Int[np.ndarray, " n"]:
        """The positions that are held out."""
        return np.arange(0, len(self), HELD_OUT_EVERY)

    def take(self, positions: Int[np.ndarray, " n"]) -> dict[str, Shaped[np.ndarray, "n ..."]]:
        """Return the arrays of the given positions, in their order. The disk is read in ascending order."""
        first, order = self._contexts[0], np.argsort(positions, kind="stable")
        result = {name: np.empty((len(positions), *x.shape[1:]), x.dtype) for name, x in first.items()}
        owner = np.searchsorted(self._ends, positions[order], side="right")
        for index in np.unique(owner):
            rows = order[owner == index]
            arrays = self._contexts[index]
            places = positions[rows] - (self._ends[index] - len(next(iter(arrays.values()))))
            for name, x in arrays.items():
                result[name][rows] = x[places]
        return result


class HeldOut:
    """The held-out positions, which are read by slicing."""

    def __init__(self, features: Features):
        self._features, self._positions = features, features.held_out

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, rows: slice) -> dict[str, Shaped[np.ndarray, "n ..."]]:
        return self._features.take(self._positions[rows])


THREADS, AHEAD = 8, 4
"""The number of reading threads, and the number of updates that they read ahead."""


def check_positions(count: int, rows: int) -> None:
    """Raise UserError if `count` positions leave fewer to train on than the `rows` of an update."""
    training = count - len(range(0, count, HELD_OUT_EVERY))
    if training < rows:
        raise UserError(
            f"an update takes {rows} positions, and there are {training} to train on: lower --batch, or take more or "
            "longer contexts"
        )


def batches(features: Features, rows: Rows, steps: int, seed: int) -> grain.DatasetIterator:
    """Return this process's positions of each update, which threads read while the devices compute. Each epoch is a
    permutation of the training positions. The remainder, too small for an update, is left out. There must be enough
    positions for one update (`check_positions`)."""
    positions = features.training
    per_epoch = len(positions) // rows.total
    lock = threading.Lock()

    @functools.lru_cache(maxsize=2)
    def order(epoch: int) -> Int[np.ndarray, " n"]:
        return positions[np.random.default_rng((seed, epoch)).permutation(len(positions))]

    def step(index: int) -> dict[str, Shaped[np.ndarray, "n ..."]]:
        epoch, update_in_epoch = divmod(index, per_epoch)
        with lock:  # one thread draws the order while the others wait
            epoch_positions = order(epoch)
        first = update_in_epoch * rows.total
        return features.take(epoch_positions[first + rows.own])

    reading = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=AHEAD)
    return iter(grain.MapDataset.range(steps).map(step).to_iter_dataset(reading))
