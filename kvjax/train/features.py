"""What the layers computed of contexts, with the targets that a teacher gave, kept on disk or in memory to train on.

Arrays are position-major, [positions, layers, …], so that what an update reads of a position lies in one piece. On disk
a context is a folder, which is there whole or not at all and is written once; `manifest.json` says what all are of.
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
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Shaped

from kvjax.errors import UserError
from kvjax.files import partial_folder
from kvjax.train.kept import begin_kept, check_kept, check_room, mending, size

VERSION = 1
"""Of the layout."""
HELD_OUT = 100
"""Of so many positions the first is held out."""

Arrays = Mapping[str, Shaped[np.ndarray, "n ..."]]
"""Of a context's positions."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """What is kept of a position: the shape and dtype of each array."""

    arrays: Mapping[str, tuple[tuple[int, ...], Any]]
    """By name."""

    @property
    def bytes(self) -> int:
        """Of a position."""
        return sum(int(np.prod(shape)) * jnp.dtype(dtype).itemsize for shape, dtype in self.arrays.values())


class Memory:
    """Contexts' features on the host."""

    def __init__(self, kind: Kind, sizes: Sequence[int]):
        self.kind, self.sizes = kind, tuple(sizes)
        self._kept: dict[int, Arrays] = {}

    @property
    def finished(self) -> set[int]:
        """The contexts that are there."""
        return set(self._kept)

    @property
    def plan(self) -> str:
        """What will be kept, in words."""
        return f"{size(sum(self.sizes) * self.kind.bytes)} of the host's memory"

    @contextlib.contextmanager
    def writing(self, index: int) -> Iterator[dict[str, np.ndarray]]:
        """A context's arrays to fill, which count once all are."""
        count = self.sizes[index]
        arrays = {name: np.zeros((count, *shape), dtype) for name, (shape, dtype) in self.kind.arrays.items()}
        yield arrays
        self._kept[index] = arrays

    def read(self) -> "Features":
        """All contexts, one after another."""
        return Features([self._kept[index] for index in range(len(self.sizes))])


class Shards:
    """Contexts' features in a folder.

    Args:
        manifest: what they are of; `made_for`'s fingerprint may be of another dtype of the same weights.

    Raises:
        UserError: the folder holds those of another model, of other data or options, or of another version; or the disk
            has no room for those that are missing.
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
        with self._mending():
            begin_kept(folder, wanted)

    @property
    def finished(self) -> set[int]:
        """The contexts that are there."""
        return {index for index in range(len(self.sizes)) if self._at(index).is_dir()}

    @property
    def plan(self) -> str:
        """What will be kept, in words."""
        return f"{size(sum(self.sizes) * self.kind.bytes)} in {self.folder}"

    @contextlib.contextmanager
    def writing(self, index: int) -> Iterator[dict[str, np.ndarray]]:
        """A context's arrays to fill, which are moved into place once all are.

        Raises:
            UserError: the disk fills.
        """
        count = self.sizes[index]
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
        """All contexts, one after another, mapped into memory."""

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
    """A new .npy file mapped into memory, of bfloat16 its bits. Its room is taken at once: on a disk that is full a
    mapped file would only fail while it is filled, which kills the process."""
    wanted = jnp.dtype(dtype)
    stored = wanted if wanted.isbuiltin == 1 else np.dtype(np.uint16)
    mapped = np.lib.format.open_memmap(file, mode="w+", dtype=stored, shape=shape)
    with file.open("rb+") as opened:
        os.posix_fallocate(opened.fileno(), 0, os.fstat(opened.fileno()).st_size)
    return mapped.view(wanted)


class Features:
    """Positions of contexts, one context after another."""

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
        """The others."""
        return np.arange(0, len(self), HELD_OUT)

    def take(self, positions: Int[np.ndarray, " n"]) -> dict[str, Shaped[np.ndarray, "n ..."]]:
        """Their arrays, in their order; read in the order in which they lie on disk."""
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
    """The positions that are held out, as rows to slice."""

    def __init__(self, features: Features):
        self._features, self._positions = features, features.held_out

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, rows: slice) -> dict[str, Shaped[np.ndarray, "n ..."]]:
        return self._features.take(self._positions[rows])


THREADS, AHEAD = 8, 4
"""That read, and updates that they read ahead."""


def check_positions(count: int, rows: int) -> None:
    """Raises UserError if so many positions are fewer than an update takes, beside those that are held out."""
    training = count - len(range(0, count, HELD_OUT))
    if training < rows:
        raise UserError(
            f"an update takes {rows} positions, and there are {training} to train on: lower --batch, or take more or "
            "longer contexts"
        )


def batches(features: Features, rows: int, steps: int, seed: int) -> grain.DatasetIterator:
    """Each update's `rows` positions: a permutation of those that are trained on for each epoch, of which there are as
    many (`check_positions`) and whose remainder is left out. Read by threads while the devices work."""
    positions = features.training
    each = len(positions) // rows
    lock = threading.Lock()

    @functools.lru_cache(maxsize=2)
    def order(epoch: int) -> Int[np.ndarray, " n"]:
        return positions[np.random.default_rng((seed, epoch)).permutation(len(positions))]

    def step(index: int) -> dict[str, Shaped[np.ndarray, "n ..."]]:
        epoch, inside = divmod(index, each)
        with lock:  # drawn once, and not by every thread
            own = order(epoch)
        return features.take(own[inside * rows : (inside + 1) * rows])

    reading = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=AHEAD)
    return iter(grain.MapDataset.range(steps).map(step).to_iter_dataset(reading))
