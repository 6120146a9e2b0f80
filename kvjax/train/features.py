"""Features of contexts and a teacher's targets for them, kept on disk or in memory to train on.

Arrays are position-major, [positions, layers, …], so that an update reads a position from one place. On disk a context
is a folder, which is written once and atomically. `manifest.json` says what the features were computed from.
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

from kvjax.errors import UserError
from kvjax.files import partial_folder
from kvjax.train.batches import Rows
from kvjax.train.kept import begin_kept, check_kept, check_room, mending, size

VERSION = 1
"""The version of the layout."""
HELD_OUT = 100
"""The first of every 100 positions is held out."""

Arrays = Mapping[str, Shaped[np.ndarray, "n ..."]]
"""The arrays of a context's positions, by name."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """The arrays that are kept for each position."""

    arrays: Mapping[str, tuple[tuple[int, ...], Any]]
    """The shape and dtype of each array, by name."""

    @property
    def bytes(self) -> int:
        """The bytes of a position."""
        return sum(int(np.prod(shape)) * jnp.dtype(dtype).itemsize for shape, dtype in self.arrays.values())


class Memory:
    """The features of contexts in the host's memory."""

    def __init__(self, kind: Kind, sizes: Sequence[int]):
        self.kind, self.sizes = kind, tuple(sizes)
        self._kept: dict[int, Arrays] = {}

    @property
    def finished(self) -> set[int]:
        """The indices of the contexts that are complete."""
        return set(self._kept)

    @property
    def plan(self) -> str:
        """The size of all features and their place, in words."""
        return f"{size(sum(self.sizes) * self.kind.bytes)} of the host's memory"

    @contextlib.contextmanager
    def writing(self, index: int) -> Iterator[dict[str, np.ndarray]]:
        """Yield the arrays of a context to fill. The context is finished once the block ends without an error."""
        count = self.sizes[index]
        arrays = {name: np.zeros((count, *shape), dtype) for name, (shape, dtype) in self.kind.arrays.items()}
        yield arrays
        self._kept[index] = arrays

    def read(self) -> "Features":
        """Return the features of all contexts, one after another."""
        return Features([self._kept[index] for index in range(len(self.sizes))])


class Shards:
    """The features of contexts in a folder.

    Args:
        manifest: what the features are computed from. The fingerprint in its `made_for` may be that of the same weights
            in another dtype.

    Raises:
        UserError: the folder holds features of another model, of other data or options, or of another version; or the
            disk has no space for the missing ones.
    """

    def __init__(self, folder: Path, kind: Kind, sizes: Sequence[int], manifest: Mapping[str, Any]):
        self.folder, self.kind, self.sizes = folder, kind, tuple(sizes)
        arrays = {name: [list(shape), jnp.dtype(x).name] for name, (shape, x) in kind.arrays.items()}
        wanted = {"version": VERSION, **manifest, "arrays": arrays, "positions": list(sizes)}
        check_kept(folder, wanted, "these targets", "--targets")
        missing = [n for index, n in enumerate(self.sizes) if index not in self.finished]
        remedy = "train on fewer contexts, or name a folder elsewhere (--targets)"
        what = f"the targets of {sum(missing)} positions"
        check_room(folder, sum(missing) * kind.bytes, what, remedy)
        if jax.process_index() == 0:
            with self._mending():
                begin_kept(folder, wanted)

    @property
    def finished(self) -> set[int]:
        """The indices of the contexts that are complete."""
        return {index for index in range(len(self.sizes)) if self._at(index).is_dir()}

    @property
    def plan(self) -> str:
        """The size of all features and their folder, in words."""
        return f"{size(sum(self.sizes) * self.kind.bytes)} in {self.folder}"

    @contextlib.contextmanager
    def writing(self, index: int) -> Iterator[dict[str, np.ndarray]]:
        """Yield the arrays of a context to fill. They are moved into place once the block ends without an error. All of
        several processes fill them, and the first one keeps them.

        Raises:
            UserError: the disk fills up.
        """
        count = self.sizes[index]
        if jax.process_index() > 0:
            yield {name: np.zeros((count, *x), dtype) for name, (x, dtype) in self.kind.arrays.items()}
            return
        with self._mending(), partial_folder(self._at(index)) as partial:
            arrays = {
                name: _allocated(partial / f"{name}.npy", (count, *shape), dtype)
                for name, (shape, dtype) in self.kind.arrays.items()
            }
            yield arrays
            for x in arrays.values():
                x.flush()
            try:
                partial.rename(self._at(index))
            except OSError:
                if not self._at(index).is_dir():  # else another run that shares the folder was faster
                    raise

    def read(self) -> "Features":
        """Return the features of all contexts, one after another, mapped into memory."""

        def mapped(index: int, name: str, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
            file = self._at(index) / f"{name}.npy"
            try:
                x = np.load(file, mmap_mode="r").view(jnp.dtype(dtype))
            except (OSError, ValueError) as error:
                raise UserError(
                    f"{file}: is missing or damaged ({error}): remove {self._at(index)} and go on"
                ) from None
            if x.shape != (self.sizes[index], *shape):
                raise UserError(f"{file}: is damaged: remove {self._at(index)} and go on")
            return x

        return Features(
            [
                {name: mapped(index, name, dtype, shape) for name, (shape, dtype) in self.kind.arrays.items()}
                for index in range(len(self.sizes))
            ]
        )

    def _at(self, index: int) -> Path:
        return self.folder / f"{index:05}"

    def _mending(self) -> contextlib.AbstractContextManager[None]:
        return mending(self.folder, lambda: f"{len(self.finished)} of {len(self.sizes)} contexts are")


def _allocated(file: Path, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return a new .npy file mapped into memory; bfloat16 is stored as its bits. The file is allocated at once: on a
    full disk a mapped file would only fail while it is filled, which kills the process."""
    wanted = jnp.dtype(dtype)
    stored = wanted if wanted.isbuiltin == 1 else np.dtype(np.uint16)
    mapped = np.lib.format.open_memmap(file, mode="w+", dtype=stored, shape=shape)
    with file.open("rb+") as opened:
        os.posix_fallocate(opened.fileno(), 0, os.fstat(opened.fileno()).st_size)
    return mapped.view(wanted)


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
        every = np.arange(len(self))
        return every[every % HELD_OUT != 0]

    @property
    def held_out(self) -> Int[np.ndarray, " n"]:
        """The positions that are held out."""
        return np.arange(0, len(self), HELD_OUT)

    def take(self, positions: Int[np.ndarray, " n"]) -> dict[str, Shaped[np.ndarray, "n ..."]]:
        """Return the arrays of some positions, in the given order. They are read in the order in which they lie on
        disk."""
        first, order = self._contexts[0], np.argsort(positions, kind="stable")
        found = {name: np.empty((len(positions), *x.shape[1:]), x.dtype) for name, x in first.items()}
        owner = np.searchsorted(self._ends, positions[order], side="right")
        for index in np.unique(owner):
            rows = order[owner == index]
            arrays = self._contexts[index]
            places = positions[rows] - (self._ends[index] - len(next(iter(arrays.values()))))
            for name, x in arrays.items():
                found[name][rows] = x[places]
        return found


class HeldOut:
    """The held-out positions, as rows to slice."""

    def __init__(self, features: Features):
        self._features, self._positions = features, features.held_out

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, rows: slice) -> dict[str, Shaped[np.ndarray, "n ..."]]:
        return self._features.take(self._positions[rows])


THREADS, AHEAD = 8, 4
"""The number of reading threads, and of updates that they read ahead."""


def check_positions(count: int, rows: int) -> None:
    """Raise UserError if of `count` positions fewer than the `rows` of an update are left to train on."""
    training = count - len(range(0, count, HELD_OUT))
    if training < rows:
        raise UserError(
            f"an update takes {rows} positions, and there are {training} to train on: lower --batch, or take more or "
            "longer contexts"
        )


def batches(features: Features, rows: Rows, steps: int, seed: int) -> grain.DatasetIterator:
    """Return this process's positions of each update, read by threads while the devices compute. Each epoch is a
    permutation of the training positions, of which there are enough for an update (`check_positions`). Its remainder is
    left out."""
    positions = features.training
    each = len(positions) // rows.total
    lock = threading.Lock()

    @functools.lru_cache(maxsize=2)
    def order(epoch: int) -> Int[np.ndarray, " n"]:
        return positions[np.random.default_rng((seed, epoch)).permutation(len(positions))]

    def step(index: int) -> dict[str, Shaped[np.ndarray, "n ..."]]:
        epoch, inside = divmod(index, each)
        with lock:  # one thread draws the order, the others wait for it
            own = order(epoch)
        first = inside * rows.total
        return features.take(own[first + rows.start : first + rows.stop])

    reading = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=AHEAD)
    return iter(grain.MapDataset.range(steps).map(step).to_iter_dataset(reading))
