"""What torch.save wrote, read without torch: a zip whose `*/data.pkl` says what there is (`kvjax.exported.torch_pickle`
follows it) and whose `*/data/N` hold the bytes of arrays. No more memory is taken than the file is large."""

import math
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from jaxtyping import Float32, Shaped

from kvjax.errors import UserError, shown
from kvjax.exported.torch_pickle import STORAGES, follow

BEFORE_ZIP = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""How files begin that torch wrote before 1.6."""
MOST_AXES = 16
"""Of an array."""


@dataclass(frozen=True)
class Tensor:
    """An array of a file, before its bytes are read."""

    entry: zipfile.ZipInfo
    """Where they are."""
    dtype: np.dtype
    """Of its numbers."""
    offset: int
    """Of its first number, in numbers, as strides are."""
    shape: tuple[int, ...]
    """Its sizes."""
    strides: tuple[int, ...]
    """From one index of each axis to the next."""

    @property
    def nbytes(self) -> int:
        """Of its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize


class TorchFile:
    """An open file: a context manager, whose `content` are dicts, lists and tuples of `Tensor`s, words and numbers.

    Raises UserError, in one line, where the file is none that torch writes, is damaged, or asks for what gates do not
    need.
    """

    def __init__(self, file: str | Path):
        self.file = Path(file)
        try:
            # opening a pipe would wait for its writer
            if self.file.exists() and not self.file.is_file():
                raise UserError(f"{file}: not a regular file")
            self.bytes = self.file.stat().st_size
            with self.file.open("rb") as opened:
                begins = opened.read(len(BEFORE_ZIP))
            if begins == BEFORE_ZIP:
                raise UserError(
                    f"{file}: torch wrote this before 1.6; torch.save(torch.load(FILE), FILE) makes one of today"
                )
            self._zip = zipfile.ZipFile(self.file)
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror or error})") from None
        except Exception as error:
            self._damaged(error)
        try:
            [entry] = (x for x in self._zip.infolist() if re.fullmatch(r"[^/]+/data\.pkl", x.filename))
            self._folder = entry.filename.removesuffix("data.pkl")
            self._check_order()
            program = self._zip.read(self._entry("data.pkl"))
            self.content = follow(program, file, self._storage, self._tensor)
        except Exception as error:
            self._zip.close()
            self._damaged(error)

    def __enter__(self) -> "TorchFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def read(self, tensor: Tensor) -> Shaped[np.ndarray, "..."]:
        """Its numbers, a view of the bytes that they lie in."""
        try:
            stored = self._zip.read(tensor.entry)
        except Exception as error:
            self._damaged(error)
        strides = tuple(stride * tensor.dtype.itemsize for stride in tensor.strides)
        at = tensor.offset * tensor.dtype.itemsize if stored else 0
        return np.ndarray(tensor.shape, tensor.dtype, stored, at, strides)

    def check(self, found: Sequence[Mapping[str, Any]], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse layers that lack an array, or have another one or one of another shape; no bytes are read.

        Args:
            found: what the content has of each layer. shapes: the arrays that each must have, by name.
        """
        for index, layer in enumerate(found):
            if others := layer.keys() - shapes.keys():
                unknown = shown(min(others, key=str))
                raise UserError(f"{self.file}: layer {index} has {unknown}, which is not of such gates")
            for name, wanted in shapes.items():
                if (has := shape_of(layer, name)) != wanted:
                    raise UserError(
                        f"{self.file}: layer {index}: {name} should have shape {wanted}, found {has}"
                    )
        total = sum(layer[name].nbytes for layer in found for name in shapes)
        if total > self.bytes:
            raise UserError(f"{self.file}: has {self.bytes} bytes, and says that {total} of arrays are in it")

    def stack(
        self, found: Sequence[Mapping[str, Any]], names: Iterable[str]
    ) -> dict[str, Float32[np.ndarray, "l ..."]]:
        """Return the arrays of these names, of all layers that `check` let pass, in float32. Raises UserError for
        numbers that are not finite."""
        arrays = {name: [self.read(x[name]) for x in found] for name in names}
        for name, layers in arrays.items():
            check_finite(self.file, {f"layer {index}: {name}": layer for index, layer in enumerate(layers)})
        return {name: np.stack([x.astype(np.float32) for x in layers]) for name, layers in arrays.items()}

    def _damaged(self, error: Exception) -> NoReturn:
        if isinstance(error, UserError):
            raise error
        raise UserError(f"{self.file}: no file of torch.save's, or it is damaged ({error!r})") from None

    def _check_order(self) -> None:
        if f"{self._folder}byteorder" in self._zip.namelist():
            order = self._zip.read(self._entry("byteorder"))
            if order != b"little":
                raise UserError(f"{self.file}: its byte order is {shown(order)}, expected little")

    def _entry(self, name: str) -> zipfile.ZipInfo:
        """An entry that holds its bytes as they are, as torch's do: what is packed may be larger than the file."""
        entry = self._zip.getinfo(self._folder + name)
        if not entry.file_size == entry.compress_size <= self.bytes:
            raise UserError(f"{self.file}: {name} is packed, which it never is in a file of torch.save's")
        return entry

    def _storage(self, said: Any) -> tuple[zipfile.ZipInfo, np.dtype]:
        """Of ("storage", its kind, name, device, count) the entry and the dtype."""
        word, kind, key, _, count = said
        if word != "storage" or type(key) is not str or type(count) is not int:
            raise ValueError("an array of no known storage")
        entry, dtype = self._entry(f"data/{key}"), np.dtype(STORAGES[kind.name])
        if count * dtype.itemsize != entry.file_size:
            raise UserError(
                f"{self.file}: data/{key[:20]} should hold {count} of {dtype}, has {entry.file_size} bytes"
            )
        return entry, dtype

    def _tensor(self, storage: Any, offset: Any, shape: Any, strides: Any) -> Tensor:
        """An array within its storage, in which its numbers could all have places of their own."""
        entry, dtype = storage
        whole = offset, *shape, *strides
        if len(shape) != len(strides) or len(shape) > MOST_AXES or not all(type(x) is int for x in whole):
            raise ValueError("an array without a shape")
        count, size = entry.file_size // dtype.itemsize, math.prod(shape)
        last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        if min(whole) < 0 or size > count or (size and last >= count):
            raise UserError(
                f"{self.file}: an array of shape {shape} and strides {strides}, from number {offset} on, does not lie "
                f"in the {count} numbers of its storage"
            )
        # of nothing, or of one index, strides mean nothing, and may be larger than NumPy takes
        strides = tuple(stride if size and n > 1 else 0 for n, stride in zip(shape, strides, strict=True))
        return Tensor(entry, dtype, offset if size else 0, tuple(shape), strides)


def check_finite(where: str | Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Refuse arrays with NaN, or with numbers that are infinite in float32."""
    for name, array in arrays.items():
        with np.errstate(over="ignore"):
            finite = np.isfinite(array.astype(np.float32))
        if not finite.all():
            raise UserError(f"{where}: {name} has numbers that are not finite")


def shape_of(layer: Mapping[str, Any], name: str) -> tuple[int, ...] | str:
    """An array's shape; else a word for what is there."""
    found = layer.get(name)
    return found.shape if isinstance(found, Tensor) else "nothing" if found is None else type(found).__name__


def is_torch_file(path: Any) -> bool:
    """Whether a path is a file's, or called like one of torch's, and not a folder's."""
    path = Path(path)
    return path.is_file() or (path.suffix in (".pt", ".pth") and not path.is_dir())
