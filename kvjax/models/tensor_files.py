"""The safetensors files of a model folder: what is in them, and rows of it."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from kvjax.errors import UserError
from kvjax.models.json_file import JsonObject

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True)
class TensorInFile:
    """One tensor in a file. kind: its dtype as safetensors spells it."""

    name: str
    """In the file."""
    file: Path
    """Where it is."""
    shape: tuple[int, ...]
    """As it is stored."""
    kind: str
    """Its dtype as safetensors spells it."""

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[self.kind]

    def fill(self, out: np.ndarray, start: int) -> None:
        """Read rows from `start` on into `out`; no other byte is read. Rows past the end are left alone."""
        stop = min(start + out.shape[0], self.shape[0])
        if start < stop:
            with _open(self.file) as file:
                out[: stop - start] = file.get_slice(self.name)[start:stop]


def stored_tensors(folder: Path) -> dict[str, TensorInFile]:
    """Every tensor of a model folder, by name, from the headers alone.

    Raises:
        UserError: no safetensors in the folder, a file of the index that is not there, a file that is cut off.
    """
    tensors = {}
    for path in _files(folder):
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118  (the handle is no mapping)
                header = file.get_slice(name)
                tensors[name] = TensorInFile(name, path, tuple(header.get_shape()), header.get_dtype())
    return tensors


def _files(folder: Path) -> Iterable[Path]:
    if (folder / INDEX).is_file():
        index = JsonObject.read(folder / INDEX)
        files = sorted({folder / str(name) for name in index.get("weight_map", dict).values()})
        absent = [path.name for path in files if not path.is_file()]
        if absent:
            raise UserError(f"{folder}: {INDEX} names {', '.join(absent)}, not in the folder")
        return files
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    other = sorted(
        path.name for pattern in ("*.bin", "*.pth", "*.pt", "*.gguf") for path in folder.glob(pattern)
    )
    found = f" ({', '.join(other)}: only safetensors are read from a folder)" if other else ""
    raise UserError(f"{folder}: no weights, expected {SINGLE} or {INDEX}{found}")


def _open(path: Path):
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a whole safetensors file, it may be cut off ({error})") from None
