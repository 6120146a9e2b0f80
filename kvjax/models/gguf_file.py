"""GGUF files (llama.cpp's): what the header says, and rows of tensors, dequantised as they are read.

Format: ggml's docs/gguf.md, versions 2 and 3, little-endian. The header is read here and not by the package `gguf`,
whose reader makes arrays of every token of the vocabulary: 6 seconds and 150 MiB for 49,152 tokens.
"""

import dataclasses
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.errors import UserError
from kvjax.models.json_file import JsonObject
from kvjax.models.names import LAYER, TOP, layer_name
from kvjax.models.tensor_files import TensorInFile

ARCHITECTURES = ("llama", "qwen2", "qwen3")
FLOATS = ("F32", "F16", "BF16")
QUANTISATIONS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
_ROWS = 256
"""Rows that are dequantised at a time: the package needs a few times their size."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def is_gguf(path: Path) -> bool:
    """Whether the path is meant as a GGUF file."""
    return path.suffix.lower() == ".gguf"


@dataclasses.dataclass(frozen=True)
class GgufTensor(TensorInFile):
    """One tensor of a GGUF file; `kind` is what its rows are read as."""

    quantisation: Any
    """The file's own type."""
    blocks: np.ndarray
    """Its bytes, [rows, bytes of a row]."""
    order: np.ndarray | None = None
    """Of the rows, where the file permutes them."""

    def fill(self, out: np.ndarray, start: int) -> None:
        """As `TensorInFile.fill`, dequantised by the package `gguf`."""
        from gguf.quants import dequantize

        stop = min(start + out.shape[0], self.shape[0])
        for first in range(start, stop, _ROWS):
            rows = slice(first, min(first + _ROWS, stop))
            stored = self.blocks[rows if self.order is None else self.order[rows]]
            into = out[first - start : rows.stop - start]
            into[...] = dequantize(stored, self.quantisation).reshape(into.shape)


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """The header of a GGUF file: its metadata by name, and its tensors by their names in llama.cpp."""

    path: Path
    """Of the file."""
    metadata: JsonObject
    """By name."""
    tensors: dict[str, GgufTensor]
    """By their names in llama.cpp."""

    @classmethod
    def read(cls, path: Path) -> "GgufFile":
        """Read the header; no tensor's bytes are touched.

        Raises:
            UserError: no GGUF file or not a whole one, one of several files, an architecture or a quantisation that is
                not supported, the package `gguf` is not installed.
        """
        try:
            with path.open("rb") as opened:
                cursor = _Cursor(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: cannot be read as a GGUF file ({error})") from None
        if cursor.data[:4] != b"GGUF":
            raise UserError(f"{path}: not a GGUF file, it does not begin with GGUF")
        cursor.at = 4
        try:
            (version,) = cursor.numbers("I")
            if version not in (2, 3):
                raise UserError(
                    f"{path}: GGUF version {version} is not supported, only 2 and 3 (little-endian)"
                )
            count, pairs = cursor.numbers("Q", 2)
            metadata = dict(cursor.pair() for _ in range(pairs))
            infos = [cursor.tensor() for _ in range(count)]
        except (struct.error, KeyError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: not a whole GGUF file, it may be cut off ({error})") from None
        known = JsonObject(metadata, str(path))
        architecture = known.get("general.architecture", str)
        if architecture not in ARCHITECTURES:
            raise known.error(
                f"architecture {architecture!r} is not supported, only {', '.join(ARCHITECTURES)}"
            )
        if known.get("split.count", int, 1) > 1:
            raise known.error(
                f"is one of {metadata['split.count']} files (split.count): merge them into one first"
            )
        align = known.get("general.alignment", int, 32)
        begin = -(-cursor.at // max(align, 1)) * align
        return cls(path, known, _tensors(path, cursor.data, begin, infos))

    @property
    def architecture(self) -> str:
        return self.metadata.data["general.architecture"]

    def get(self, name: str, kind: type, *default: Any) -> Any:
        """The architecture's own value of that name, such as `llama.block_count`."""
        return self.metadata.get(f"{self.architecture}.{name}", kind, *default)

    def hugging_face_tensors(self) -> dict[str, TensorInFile]:
        """The tensors by Hugging Face's names, laid out as there; what has no such name keeps its own."""
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        layers = self.get("block_count", int)
        arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == self.architecture)
        known = get_tensor_name_map(arch, layers)
        wanted = [*TOP.values(), *(layer_name(path, layer) for layer in range(layers) for path in LAYER)]
        names = {known.get_name(name, (".weight", ".bias")): name for name in wanted}
        heads = self.get("attention.head_count", int)
        kv_heads = self.get("attention.head_count_kv", int, heads)
        # only llama's pairs of a rotation are neighbours there
        permuted = {"attn_q": heads, "attn_k": kv_heads} if self.architecture == "llama" else {}
        found: dict[str, TensorInFile] = {}
        for tensor in self.tensors.values():
            part = tensor.name.split(".")[-2] if "." in tensor.name else ""
            order = _halves(tensor.shape[0], permuted[part]) if part in permuted else None
            name = names.get(tensor.name, tensor.name)
            found[name] = dataclasses.replace(tensor, name=name, order=order)
        # its numbers are in the config
        found.pop("rope_freqs.weight", None)
        return found


def _halves(rows: int, heads: int) -> np.ndarray | None:
    """Where each row of a Hugging Face projection, whose heads hold the first elements of all pairs and then the second
    ones, stands in llama.cpp's, where the two of a pair are neighbours. None for rows that are no pairs of heads."""
    if rows % (2 * heads):
        return None
    return np.arange(rows).reshape(heads, -1, 2).transpose(0, 2, 1).reshape(-1)


def _tensors(path: Path, data: mmap.mmap, begin: int, infos: list[tuple]) -> dict[str, GgufTensor]:
    try:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    except ModuleNotFoundError:
        raise UserError(
            f"{path}: GGUF files need the package gguf, which is not installed: pip install gguf"
        ) from None
    kinds = {kind.value: kind for kind in GGMLQuantizationType}
    tensors, unknown = {}, {}
    for name, shape, number, offset in infos:
        kind = kinds.get(number)
        label = kind.name if kind is not None else f"type {number}"
        # a row holds whole blocks; llama.cpp never quantises vectors
        if (
            kind is None
            or len(shape) < (1 if label in FLOATS else 2)
            or label not in (*FLOATS, *QUANTISATIONS)
        ):
            unknown.setdefault(label, name)
            continue
        block, size = GGML_QUANT_SIZES[kind]
        row = math.prod(shape[1:])
        bytes_ = shape[0] * row * size // block
        if row % block or not bytes_ or begin + offset + bytes_ > len(data):
            raise UserError(
                f"{path}: not a whole GGUF file, it may be cut off ({name} has shape {shape} in {label} and should end "
                f"at byte {begin + offset + bytes_} of {len(data)})"
            )
        blocks = np.frombuffer(data, np.uint8, bytes_, begin + offset).reshape(shape[0], -1)
        tensors[name] = GgufTensor(name, path, shape, label if label in FLOATS else "F32", kind, blocks)
    if unknown:
        named = ", ".join(f"{label} ({name})" for label, name in unknown.items())
        raise UserError(f"{path}: {named} is not supported, only {', '.join((*FLOATS, *QUANTISATIONS))}")
    return tensors


class _Cursor:
    """Reads a header's values one after another. Raises struct.error where the file ends."""

    def __init__(self, data: mmap.mmap):
        self.data, self.at = data, 0

    def numbers(self, code: str, count: int = 1) -> tuple:
        layout = struct.Struct(f"<{count}{code}")
        values = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return values

    def text(self) -> str:
        (length,) = self.numbers("Q")
        (raw,) = self.numbers("s", length)
        return raw.decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.numbers(_SCALARS[kind])[0]
        (inner,), (count,) = self.numbers("I"), self.numbers("Q")
        if inner in _SCALARS:
            return list(self.numbers(_SCALARS[inner], count))
        return [self.value(inner) for _ in range(count)]

    def pair(self) -> tuple[str, Any]:
        name = self.text()
        return name, self.value(*self.numbers("I"))

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape with the rows first, number of the quantisation, offset of the data."""
        name = self.text()
        shape = self.numbers("Q", *self.numbers("I"))[::-1]
        return name, shape, *self.numbers("I"), *self.numbers("Q")
