"""The safetensors files of a model folder: their headers, and reading of tensors by rows."""

import contextlib
import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from kvjax.errors import UserError
from kvjax.files import check_regular
from kvjax.models.json_file import JsonObject
from kvjax.models.kinds import few, kind_of_file, kind_of_folder
from kvjax.models.names import TOP, canonical

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
FLOAT8 = "F8_E4M3"
"""The dtype of 8-bit floats, which only the matrices of layers can have."""
SINGLE, INDEX, ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_config.json"
LARGEST_HEADER = 8 << 20
"""The maximum bytes of a file's header. A dense model has about ten tensors per layer, of about 120 bytes each."""
_COMPARED_BYTES = 8 << 20
"""The bytes of a tensor that are compared at a time."""


@dataclasses.dataclass(frozen=True)
class TensorInFile:
    """One tensor in a file."""

    name: str
    """The tensor's name in the file."""
    file: Path
    shape: tuple[int, ...]
    kind: str
    """The dtype as safetensors spells it."""

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(ml_dtypes.float8_e4m3fn) if self.kind == FLOAT8 else DTYPES[self.kind]

    def fill(self, out: np.ndarray, start: int) -> None:
        """Read rows from `start` on into `out`, and no other bytes. Rows of `out` past the tensor's end are left
        alone."""
        stop = min(start + out.shape[0], self.shape[0])
        if start < stop:
            with _open(self.file) as file:
                out[: stop - start] = file.get_slice(self.name)[start:stop]

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return the rows from `start` to `stop`, or to the end."""
        rows = min(self.shape[0] if stop is None else stop, self.shape[0]) - start
        out = np.empty((rows, *self.shape[1:]), self.dtype)
        self.fill(out, start)
        return out


@dataclasses.dataclass(frozen=True)
class Float8InFile(TensorInFile):
    """A tensor of 8-bit floats, which safetensors (0.8) does not read into NumPy."""

    offset: int
    """The offset of its first byte in the file."""

    def fill(self, out: np.ndarray, start: int) -> None:
        """Fill `out` as `TensorInFile.fill` does."""
        stop, row = min(start + out.shape[0], self.shape[0]), math.prod(self.shape[1:])
        if start < stop:
            data = np.fromfile(self.file, np.uint8, (stop - start) * row, offset=self.offset + start * row)
            out[: stop - start] = data.view(self.dtype).reshape(-1, *self.shape[1:])


@dataclasses.dataclass(frozen=True)
class RowsOfTensor(TensorInFile):
    """Consecutive rows of a tensor, such as the queries in a tensor of queries, keys and values."""

    source: TensorInFile
    """The tensor that holds the rows."""
    first: int
    """The index of the first row in `source`."""

    def fill(self, out: np.ndarray, start: int) -> None:
        """Fill `out` as `TensorInFile.fill` does."""
        stop = min(start + out.shape[0], self.shape[0])
        if start < stop:
            self.source.fill(out[: stop - start], self.first + start)


@dataclasses.dataclass(frozen=True)
class ColumnsOfTensors(TensorInFile):
    """Tensors of the same shape side by side, such as those of a layer's experts."""

    parts: tuple[TensorInFile, ...]
    """The tensors, in order."""

    @classmethod
    def of(cls, parts: Sequence[TensorInFile]) -> "ColumnsOfTensors":
        first = parts[0]
        shape, kinds = (first.shape[0], len(parts) * first.shape[1]), {part.kind for part in parts}
        return cls(first.name, first.file, shape, first.kind if len(kinds) == 1 else "F32", tuple(parts))

    def fill(self, out: np.ndarray, start: int) -> None:
        """Fill `out` as `TensorInFile.fill` does."""
        for part, columns in zip(self.parts, np.split(out, len(self.parts), 1), strict=True):
            part.fill(columns, start)


def stored_tensors(folder: Path) -> dict[str, TensorInFile]:
    """Return every tensor of a model folder by its `canonical` name. Only the headers are read.

    Raises:
        UserError: the folder has no safetensors, a file of the index is missing or cut off, or a tensor is stored
            twice.
    """
    tensors: dict[str, TensorInFile] = {}
    for path in _files(folder):
        for tensor in tensors_of(path):
            name = canonical(tensor.name)
            if name in tensors:
                files = few(sorted({tensors[name].file.name, path.name}))
                raise UserError(f"{folder}: {few([tensor.name])} is stored twice, in {files}")
            tensors[name] = tensor
    return tensors


def tensors_of(file: Path) -> Iterator[TensorInFile]:
    """Yield every tensor of a safetensors file. Only its header is read."""
    _check_header(file)
    offsets = functools.cache(_offsets)
    with _open(file) as opened:
        for name in opened.keys():  # noqa: SIM118  (the handle is no mapping)
            header = opened.get_slice(name)
            tensor = name, file, tuple(header.get_shape()), header.get_dtype()
            yield Float8InFile(*tensor, offsets(file)[name]) if tensor[3] == FLOAT8 else TensorInFile(*tensor)


def _offsets(file: Path) -> dict[str, int]:
    """Return the offset of the first byte of each tensor in a safetensors file."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    return {
        name: 8 + size + tensor["data_offsets"][0]
        for name, tensor in header.items()
        if "data_offsets" in tensor
    }


def has_own_head(folder: Path, names: Callable[[dict[str, Any]], dict[str, Any]]) -> bool:
    """Return True if a folder's weights hold an output head that differs from the embedding. `names`:
    `Family.text_tensors`.

    It is False if the weights cannot be read: loading them will say why.
    """
    with contextlib.suppress(UserError):
        stored = names(stored_tensors(folder))
        head, embed = stored.get(TOP["head"]), stored.get(TOP["embed"])
        return head is not None and embed is not None and not _equal(head, embed)
    return False


def _equal(one: TensorInFile, other: TensorInFile) -> bool:
    """Return True if two tensors have the same values. They are compared piece by piece."""
    size = math.prod(one.shape)
    if one.shape != other.shape or not size or not {one.kind, other.kind} <= DTYPES.keys():
        return False
    rows = one.shape[0] if one.shape else 0
    step = max(1, _COMPARED_BYTES * rows // (4 * size))
    for start in range(0, rows, step):
        x, y = (tensor.read(start, start + step) for tensor in (one, other))
        same = one.kind == other.kind and np.array_equal(x.view(np.uint8), y.view(np.uint8))
        if not same and not np.array_equal(x.astype(np.float32), y.astype(np.float32), equal_nan=True):
            return False
    return True


def ignored_files(folder: Path) -> tuple[str, list[str]]:
    """Return the name of the file that is read for weights, and the names of other candidates that are ignored."""
    used = SINGLE if (folder / SINGLE).exists() else INDEX
    return used, [name for name in (INDEX, ADAPTER) if name != used and (folder / name).exists()]


def _files(folder: Path) -> list[Path]:
    """Return the files that hold a folder's weights. As in transformers, a single file takes precedence over an
    index."""
    if os.path.lexists(folder / SINGLE):
        return [folder / SINGLE]
    if not os.path.lexists(folder / INDEX):
        raise UserError(f"{folder}: no weights, expected {SINGLE} or {INDEX}{kind_of_folder(folder)}")
    check_regular(folder / INDEX)
    index = JsonObject.read(folder / INDEX)
    names = list(index.get("weight_map", dict).values())
    if outside := [str(name) for name in names if not _is_inside(name)]:
        raise UserError(f"{folder / INDEX}: names {few(outside)}, expected files in the folder")
    files = [folder / name for name in sorted(set(names))]
    if absent := [path.name for path in files if not _exists(path)]:
        raise UserError(f"{folder}: {INDEX} names {few(absent)}, not in the folder")
    return files


def _is_inside(name: object) -> bool:
    """Return True if a name in an index names a file inside the folder."""
    path = PurePosixPath(name) if isinstance(name, str) and "\0" not in name else PurePosixPath("..")
    return path.parts != () and not path.is_absolute() and ".." not in path.parts


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # the name is too long
        return False


def _check_header(file: Path) -> None:
    """Refuse a header with so many tensors that reading it takes minutes."""
    size = check_regular(file)
    with file.open("rb") as opened:
        header = int.from_bytes(opened.read(8), "little")
    if LARGEST_HEADER < header < size:
        raise UserError(f"{file}: its header has {header:,} bytes, expected at most {LARGEST_HEADER:,}")


def _open(path: Path):
    check_regular(path)
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        kind = kind_of_file(path) or f"not a whole safetensors file, it may be cut off ({error})"
        raise UserError(f"{path}: {kind}") from None
