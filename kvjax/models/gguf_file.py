"""GGUF files (llama.cpp's format): their headers, and rows of their tensors, dequantised as they are read.

The format is described in ggml's docs/gguf.md; versions 2 and 3, little-endian, are read. The header is not read with
the package `gguf`, whose reader makes an array of every token: 6 seconds and 150 MiB for 49,152 tokens.

Files are not trusted. Every count in them is checked against the file's size or a bound before any work depends on it.
"""

import dataclasses
import itertools
import math
import mmap
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.errors import UserError, shown
from kvjax.files import check_regular
from kvjax.models.families import GGUF
from kvjax.models.json_file import JsonObject
from kvjax.models.names import EXPERT, TOP, layer_name
from kvjax.models.tensor_files import TensorInFile

FLOATS = ("F32", "F16", "BF16")
QUANTISATIONS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
FACTORS = {"rope_factors_short.weight": "short_factor", "rope_factors_long.weight": "long_factor"}
"""The tensors of LongRoPE's factors, and their keys in `config.json`."""
_ROWS = 256
"""The number of rows dequantised at a time: the package `gguf` needs a few times their memory."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_VALUES = 1 << 22
"""The maximum number of values of an array in the metadata. The largest vocabularies have 300,000 tokens and 600,000
merges."""
_MOST_AXES = 4
"""The maximum number of axes of a tensor, as in ggml."""
_OTHER_KINDS = {
    "adapter": "a LoRA adapter: merge it into its base model first (llama-export-lora)",
    "mmproj": "the projector of a multimodal model: pass the file of its language model",
    "imatrix": "an importance matrix for quantisation",
}
"""Kinds of GGUF files without a language model, by `general.type`."""


def is_gguf(path: Path) -> bool:
    """Return True if the path has the suffix of GGUF files."""
    return path.suffix.lower() == ".gguf"


@dataclasses.dataclass(frozen=True)
class GgufTensor(TensorInFile):
    """One tensor of a GGUF file. Its rows are read in the dtype `kind`."""

    quantisation: Any
    """The type of the tensor in the file."""
    blocks: np.ndarray
    """The tensor's bytes, [rows, bytes per row]."""
    order: np.ndarray | None = None
    """The row of the file for each row of the tensor; None if they are in the same order."""
    offset: float = 0.0
    """The number that the file adds to the values."""

    def fill(self, out: np.ndarray, start: int) -> None:
        """Fill `out` as `TensorInFile.fill` does, dequantised by the package `gguf`."""
        from gguf.quants import dequantize

        stop = min(start + out.shape[0], self.shape[0])
        for first in range(start, stop, _ROWS):
            rows = slice(first, min(first + _ROWS, stop))
            stored = self.blocks[rows if self.order is None else self.order[rows]]
            target = out[first - start : rows.stop - start]
            target[...] = dequantize(stored, self.quantisation).reshape(target.shape) - self.offset


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """The header of a GGUF file."""

    path: Path
    metadata: JsonObject
    """The metadata by name."""
    tensors: dict[str, GgufTensor]
    """The tensors by their names in llama.cpp."""

    @classmethod
    def read(cls, path: Path) -> "GgufFile":
        """Read the header. No tensor's bytes are read.

        Raises:
            UserError: the file is not GGUF, is cut off, is a part of a split file or holds no language model; its
                architecture or quantisation is not supported; or the package `gguf` is not installed.
        """
        check_regular(path)
        try:
            with path.open("rb") as opened:
                cursor = _Cursor(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: cannot be read as a GGUF file ({error})") from None
        _check_signature(path, cursor.data[:64])
        cursor.position = 8
        try:
            count, pairs = cursor.numbers("Q", 2)
            values = _unique("the key", (cursor.pair() for _ in range(pairs)))
            infos = _unique("the tensor", (cursor.tensor() for _ in range(count)))
        except (struct.error, UnicodeDecodeError) as error:
            raise UserError(f"{path}: not a whole GGUF file, it may be cut off ({error})") from None
        except ValueError as error:
            raise UserError(f"{path}: not a valid GGUF file ({error})") from None
        metadata = JsonObject(values, str(path))
        _check_kind(metadata)
        for name in ("tokens", "merges"):
            if not all(isinstance(x, str) for x in metadata.get(f"tokenizer.ggml.{name}", list, [])[:1]):
                raise metadata.error(f"tokenizer.ggml.{name} must be a list of strings")
        align = metadata.get("general.alignment", int, 32)
        if align < 1 or align & (align - 1):
            raise metadata.error(f"general.alignment must be a power of two, got {align}")
        data_start = -(-cursor.position // align) * align
        return cls(path, metadata, _tensors(path, cursor.data, data_start, align, infos))

    @property
    def architecture(self) -> str:
        return self.metadata.data["general.architecture"]

    def get(self, name: str, kind: type, *default: Any) -> Any:
        """Return the value of a key of the architecture, such as `block_count` for `llama.block_count`."""
        return self.metadata.get(f"{self.architecture}.{name}", kind, *default)

    def hugging_face_tensors(self) -> dict[str, TensorInFile]:
        """Return the tensors by Hugging Face's names and in its layout. Tensors without such a name keep their GGUF
        name."""
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        layers = self.get("block_count", int)
        # checked first, since names are made for every layer
        if not 0 <= layers <= len(self.tensors):
            raise self.metadata.error(
                f"{self.architecture}.block_count is {layers}, but the file has {len(self.tensors)} tensors"
            )
        arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == self.architecture)
        gguf_names = get_tensor_name_map(arch, layers)
        family = GGUF[self.architecture]
        # GGUF files hold the experts of a layer in one tensor
        in_layer = dict.fromkeys(name.replace(f".{EXPERT}", "") for name in family.layer_names.values())
        all_names = [
            *TOP.values(),
            *(layer_name(name, layer) for layer in range(layers) for name in in_layer),
        ]
        names = {gguf_names.get_name(name, (".weight", ".bias")): name for name in all_names}
        heads = self.get("attention.head_count", int)
        kv_heads = self.get("attention.head_count_kv", int, heads)
        experts = self.get("expert_count", int, 0) if family.gguf_experts else 0
        # only llama's files store the two elements of a rotated pair next to each other
        permuted = {"attn_q": heads, "attn_k": kv_heads} if self.architecture == "llama" else {}
        result: dict[str, TensorInFile] = {}
        for tensor in self.tensors.values():
            module = tensor.name.split(".")[-2] if "." in tensor.name else ""
            order = _halves(tensor.shape[0], permuted[module]) if module in permuted else None
            name = names.get(tensor.name, tensor.name)
            if name in result:
                raise self.metadata.error(f"the tensor {name} is there twice, once as {tensor.name}")
            offset = family.gguf_norm_offset if name.endswith("norm.weight") else 0.0
            for part_name, part in _experts(tensor, name, experts):
                result[part_name] = dataclasses.replace(part, name=part_name, order=order, offset=offset)
        # the config already has these numbers
        for name in ("rope_freqs.weight", *FACTORS):
            result.pop(name, None)
        return result


def _experts(tensor: GgufTensor, name: str, experts: int) -> Iterator[tuple[str, GgufTensor]]:
    """Yield the tensors of single experts with their Hugging Face names, given the tensor that holds all experts of a
    layer. Any other tensor is yielded unchanged."""
    before, between, after = name.partition("mlp.experts.")
    if not between or len(tensor.shape) != 3 or tensor.shape[0] != experts:
        yield name, tensor
        return
    blocks = tensor.blocks.reshape(*tensor.shape[:2], -1)
    for expert in range(experts):
        matrix = dataclasses.replace(tensor, shape=tensor.shape[1:], blocks=blocks[expert])
        yield f"{before}{between}{expert}.{after}", matrix


def _halves(rows: int, heads: int) -> np.ndarray | None:
    """Return the row of llama.cpp's projection for each row of Hugging Face's. In Hugging Face a head holds the first
    elements of all pairs and then the second elements; in llama.cpp the two elements of a pair are adjacent. None if
    the rows are not pairs in each head."""
    if rows % (2 * heads):
        return None
    return np.arange(rows).reshape(heads, -1, 2).transpose(0, 2, 1).reshape(-1)


def _check_signature(path: Path, first_bytes: bytes) -> None:
    """Refuse a file that does not begin like a GGUF file of a supported version."""
    if first_bytes[:4] != b"GGUF":
        kind = "not a GGUF file, it does not begin with GGUF"
        if first_bytes.startswith(b"version https://git-lfs"):
            kind = "a Git LFS pointer, not the GGUF file itself: git lfs pull fetches it"
        elif first_bytes.lstrip(b"\xef\xbb\xbf \r\n\t").startswith(b"<"):
            kind = "a web page, not a GGUF file: download the file again"
        raise UserError(f"{path}: {kind}")
    if len(first_bytes) < 8:
        raise UserError(f"{path}: not a whole GGUF file, it may be cut off (it has {len(first_bytes)} bytes)")
    (version,) = struct.unpack_from("<I", first_bytes, 4)
    if version and not version & 0xFFFF:
        raise UserError(
            f"{path}: is a big-endian GGUF file, only little-endian ones are supported: gguf-convert-endian, of the "
            "package gguf, converts it"
        )
    if version not in (2, 3):
        raise UserError(f"{path}: GGUF version {version} is not supported, only 2 and 3")


def _check_kind(metadata: JsonObject) -> None:
    """Refuse parts of split files, files without a language model, and unsupported architectures."""
    # checked first, since parts after the first have no other keys
    parts = metadata.get("split.count", int, 1)
    if parts > 1:
        raise metadata.error(
            f"is part {metadata.get('split.no', int, 0) + 1} of {parts} of a split GGUF file: merge the parts first "
            "(llama-gguf-split --merge FIRST-PART OUT.gguf)"
        )
    kind = metadata.get("general.type", str, "model")
    architecture = metadata.get("general.architecture", str, None)
    kind = "mmproj" if architecture == "clip" else kind
    if kind != "model":
        raise metadata.error(
            f"is not a language model but {_OTHER_KINDS.get(kind, f'of general.type {kind!r}')}"
        )
    if architecture is None:
        raise metadata.error("general.architecture is missing")
    if architecture not in GGUF:
        raise metadata.error(f"architecture {architecture!r} is not supported, only {', '.join(GGUF)}")


def _unique(noun: str, pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a mapping. Raises ValueError for a repeated name, which the message calls `noun`."""
    mapping: dict[str, Any] = {}
    for name, value in pairs:
        if name in mapping:
            raise ValueError(f"{noun} {shown(name)} is there twice")
        mapping[name] = value
    return mapping


def _tensors(
    path: Path,
    data: mmap.mmap,
    data_start: int,
    align: int,
    infos: dict[str, tuple[tuple[int, ...], int, int]],
) -> dict[str, GgufTensor]:
    """Return the tensors. The offsets in `infos` count from `data_start`."""
    try:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    except ModuleNotFoundError:
        raise UserError(
            f"{path}: GGUF files need the package gguf, which is not installed: pip install gguf"
        ) from None
    kinds = {kind.value: kind for kind in GGMLQuantizationType}
    tensors, unknown, spans = {}, {}, []
    for name, (shape, number, offset) in infos.items():
        kind = kinds.get(number)
        label = kind.name if kind is not None else f"type {number}"
        # llama.cpp never quantises vectors
        if kind is None or label not in (*FLOATS, *QUANTISATIONS) or (label not in FLOATS and len(shape) < 2):
            unknown.setdefault(label, name)
            continue
        block, size = GGML_QUANT_SIZES[kind]
        row = math.prod(shape[1:])
        # blocks do not cross rows, nor the rows of single experts
        if not row * shape[0] or row % block or (len(shape) == 3 and shape[-1] % block) or offset % align:
            raise UserError(
                f"{path}: the tensor {shown(name)} cannot have shape {shape} in {label} at offset {offset}"
            )
        bytes_, start = shape[0] * row * size // block, data_start + offset
        if start + bytes_ > len(data):
            raise UserError(
                f"{path}: not a whole GGUF file, it may be cut off ({shown(name)} has shape {shape} in {label} and "
                f"should end at byte {start + bytes_} of {len(data)})"
            )
        spans.append((start, start + bytes_, name))
        blocks = np.frombuffer(data, np.uint8, bytes_, start).reshape(shape[0], -1)
        tensors[name] = GgufTensor(name, path, shape, label if label in FLOATS else "F32", kind, blocks)
    if unknown:
        named = ", ".join(f"{label} ({name})" for label, name in list(unknown.items())[:5])
        raise UserError(f"{path}: {named} is not supported, only {', '.join((*FLOATS, *QUANTISATIONS))}")
    for (_, end, name), (start, _, other) in itertools.pairwise(sorted(spans)):
        if start < end:
            raise UserError(f"{path}: the tensors {shown(name)} and {shown(other)} overlap")
    return tensors


class _Cursor:
    """A position in a header, whose values are read in order. Raises struct.error at the file's end."""

    def __init__(self, data: mmap.mmap):
        self.data, self.position = data, 0

    def numbers(self, code: str, count: int = 1) -> tuple:
        layout = struct.Struct(f"<{count}{code}")
        values = layout.unpack_from(self.data, self.position)
        self.position += layout.size
        return values

    def text(self) -> str:
        (length,) = self.numbers("Q")
        (raw,) = self.numbers("s", length)
        return raw.decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.numbers(_scalar(kind))[0]
        (inner,), (count,) = self.numbers("I"), self.numbers("Q")
        # llama.cpp refuses arrays of arrays as well
        if inner == _ARRAY or count > _MOST_VALUES:
            content = "arrays" if inner == _ARRAY else f"{count} values"
            raise ValueError(f"an array of {content}, expected at most {_MOST_VALUES} numbers or strings")
        if inner == _STRING:
            return [self.text() for _ in range(count)]
        return list(self.numbers(_scalar(inner), count))

    def pair(self) -> tuple[str, Any]:
        name = self.text()
        return name, self.value(*self.numbers("I"))

    def tensor(self) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        """Return a tensor's name and its shape (rows first), the number of its quantisation and the offset of its
        data."""
        name, (axes,) = self.text(), self.numbers("I")
        if not 1 <= axes <= _MOST_AXES:
            raise ValueError(f"the tensor {shown(name)} has {axes} axes, expected 1 to {_MOST_AXES}")
        return name, (self.numbers("Q", axes)[::-1], *self.numbers("I"), *self.numbers("Q"))


def _scalar(kind: int) -> str:
    """Return the code of the struct module for a type of numbers."""
    if kind not in _SCALARS:
        raise ValueError(f"a value of type {kind}, which GGUF does not have")
    return _SCALARS[kind]
