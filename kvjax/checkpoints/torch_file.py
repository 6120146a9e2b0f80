"""Reading of files that torch.save wrote, without torch.

Such a file is a zip archive. Its `*/data.pkl` is a pickle that describes the content, and its `*/data/N` hold the bytes
of arrays. A pickle is a program that may call anything, so it is not run. Instead, the few instructions for containers
and arrays are interpreted here, and the names that the pickle asks for have fixed meanings. Nothing is imported or
called, and anything else is refused. The arrays take at most twice as much memory as the file.
"""

import math
import pickletools
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
from jaxtyping import Float32, Shaped

from kvjax.errors import UserError, shown
from kvjax.files import check_regular

OLD_SIGNATURE = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The first bytes of files that torch wrote before 1.6."""
MAX_AXES = 16
STORAGES: dict[str, Any] = {
    "torch.DoubleStorage": np.float64,
    "torch.FloatStorage": np.float32,
    "torch.HalfStorage": np.float16,
    "torch.BFloat16Storage": ml_dtypes.bfloat16,
    "torch.LongStorage": np.int64,
    "torch.IntStorage": np.int32,
    "torch.ShortStorage": np.int16,
    "torch.CharStorage": np.int8,
    "torch.ByteStorage": np.uint8,
    "torch.BoolStorage": np.bool_,
}
"""Dtypes of arrays by torch's names."""
TENSOR = "torch._utils._rebuild_tensor_v2"
PARAMETER = "torch._utils._rebuild_parameter"
DICTIONARY = "collections.OrderedDict"
UNREAD = {
    *("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"),
    *("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"),
    *("numpy.ndarray", "numpy.dtype", "_codecs.encode"),
}
"""The names in pickles of NumPy's numbers (losses, accuracies). They are accepted, but their values are not read."""
NAMES = {TENSOR, PARAMETER, DICTIONARY, *UNREAD, *STORAGES}
"""All names that a pickle may ask for."""
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE"}
"""The instructions that push their argument."""


@dataclass(frozen=True)
class Tensor:
    """An array in a file, whose bytes have not been read."""

    entry: zipfile.ZipInfo
    dtype: np.dtype
    offset: int
    """The index of the first number in its storage. Offset and strides count numbers, not bytes."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Global:
    """A name that the pickle asks for, with its module."""

    name: str


class Unread:
    """A value that is not needed."""


class TorchFile:
    """An open file, used as a context manager. Its `content` consists of dicts, lists and tuples of `Tensor`s, strings,
    numbers and `Unread`.

    Raises UserError if the file was not written by torch.save, is damaged, or asks for something that gates do not
    need.
    """

    def __init__(self, file: str | Path):
        self.file = Path(file)
        self.bytes = check_regular(self.file)
        self._stored: dict[str, bytes] = {}
        try:
            with self.file.open("rb") as opened:
                first_bytes = opened.read(len(OLD_SIGNATURE))
            if first_bytes == OLD_SIGNATURE:
                raise UserError(
                    f"{file}: torch wrote this before 1.6; torch.save(torch.load(FILE), FILE) converts it"
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
            self.content = self._interpret(self._zip.read(self._entry("data.pkl")))
        except Exception as error:
            self._zip.close()
            self._damaged(error)

    def __enter__(self) -> "TorchFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def read(self, tensor: Tensor) -> Shaped[np.ndarray, "..."]:
        """Return an array as a view of its storage's bytes, which are read once for all arrays in them."""
        name = tensor.entry.filename
        if name not in self._stored:
            try:
                self._stored[name] = self._zip.read(tensor.entry)
            except Exception as error:
                self._damaged(error)
        stored = self._stored[name]
        strides = tuple(stride * tensor.dtype.itemsize for stride in tensor.strides)
        offset = tensor.offset * tensor.dtype.itemsize if stored else 0
        return np.ndarray(tensor.shape, tensor.dtype, stored, offset, strides)

    def layers(self, name: re.Pattern[str], kind: str) -> list[dict[str, Any]]:
        """Return the content of each layer by name. `content` is a dict.

        Args:
            name: matches a name of the file: the layer's index, and the name within the layer.
            kind: what the file should hold, in the plural.

        Raises:
            UserError: the file has another name.
        """
        by_layer: dict[int, dict[str, Any]] = {}
        for whole_name, value in self.content.items() if isinstance(self.content, dict) else ():
            parts = name.fullmatch(str(whole_name))
            if parts is None:
                raise UserError(f"{self.file}: these are no {kind}, which have no {shown(whole_name)}")
            by_layer.setdefault(int(parts[1]), {})[parts[2]] = value
        return [by_layer.get(index, {}) for index in range(max(by_layer, default=-1) + 1)]

    def check(self, content: Sequence[Mapping[str, Any]], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse layers with a missing array, an unknown array or a wrong shape. No bytes are read.

        Args:
            content: the content of each layer.
            shapes: the shapes of the arrays that each layer must have, by name.
        """
        for index, layer in enumerate(content):
            if others := layer.keys() - shapes.keys():
                unknown = shown(min(others, key=str))
                raise UserError(f"{self.file}: layer {index} has {unknown}, which such gates do not have")
            for name, expected in shapes.items():
                if (found := shape_of(layer, name)) != expected:
                    raise UserError(
                        f"{self.file}: layer {index}: {name} should have shape {expected}, found {found}"
                    )
        total = sum(layer[name].nbytes for layer in content for name in shapes)
        # layers may share an array (as DBTrimKV's last one), which is then read for each of them
        if total > 2 * self.bytes:
            raise UserError(f"{self.file}: has {self.bytes} bytes, but declares arrays of {total} bytes")

    def stack(
        self, content: Sequence[Mapping[str, Any]], names: Iterable[str]
    ) -> dict[str, Float32[np.ndarray, "l ..."]]:
        """Return the named arrays of all layers, stacked, in float32. `check` must have accepted `content`. Raises
        UserError for numbers that are not finite."""
        arrays = {name: [self.read(layer[name]) for layer in content] for name in names}
        for name, layers in arrays.items():
            check_finite(self.file, {f"layer {index}: {name}": layer for index, layer in enumerate(layers)})
        return {name: np.stack([x.astype(np.float32) for x in layers]) for name, layers in arrays.items()}

    def _damaged(self, error: Exception) -> NoReturn:
        if isinstance(error, UserError):
            raise error
        raise UserError(f"{self.file}: not a file of torch.save, or damaged ({error!r})") from None

    def _check_order(self) -> None:
        if f"{self._folder}byteorder" in self._zip.namelist():
            order = self._zip.read(self._entry("byteorder"))
            if order != b"little":
                raise UserError(f"{self.file}: its byte order is {shown(order)}, expected little")

    def _entry(self, name: str) -> zipfile.ZipInfo:
        """Return an uncompressed entry, as torch writes them. A compressed one could expand beyond the file's size."""
        entry = self._zip.getinfo(self._folder + name)
        if not entry.file_size == entry.compress_size <= self.bytes:
            raise UserError(f"{self.file}: {name} is compressed, which torch.save never does")
        return entry

    def _interpret(self, program: bytes) -> Any:
        """Interpret a program of pickle's protocol 2, which torch uses, and return its value.

        Raises:
            UserError: the program has an instruction or a name that gates do not need.
            Exception: the program is damaged; the exception may be of any kind.
        """
        stack: list[Any] = []
        marks: list[int] = []
        memo: dict[int, Any] = {}
        instructions: Any = pickletools.genops(program)

        def pop(count: int | None = None) -> list[Any]:
            """Remove and return the last `count` values, or all values since the last mark."""
            start = marks.pop() if count is None else len(stack) - count
            if start < (marks[-1] if marks else 0):
                raise ValueError("too few values")
            values = stack[start:]
            del stack[start:]
            return values

        def top(*kinds: type) -> Any:
            if type(stack[-1]) not in kinds:
                raise ValueError(f"a {type(stack[-1]).__name__} in the wrong place")
            return stack[-1]

        for instruction, argument, _ in instructions:
            match instruction.name:
                case "PROTO":
                    pass
                case "STOP":
                    return stack[-1]
                case "MARK":
                    marks.append(len(stack))
                case "BINPUT" | "LONG_BINPUT":
                    memo[argument] = stack[-1]
                case "BINGET" | "LONG_BINGET":
                    stack.append(memo[argument])
                case "EMPTY_DICT":
                    stack.append({})
                case "EMPTY_LIST":
                    stack.append([])
                case "TUPLE":
                    stack.append(tuple(pop()))
                case "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                    stack.append(tuple(pop(int(name[-1]))))
                case "SETITEM" | "SETITEMS" as name:
                    pairs = pop(2 if name == "SETITEM" else None)
                    if not all(type(key) in (str, int) for key in pairs[::2]):
                        raise ValueError("a key is neither a string nor an integer")
                    top(dict).update(zip(pairs[::2], pairs[1::2], strict=True))
                case "APPEND" | "APPENDS" as name:
                    values = pop(1 if name == "APPEND" else None)
                    top(list).extend(values)
                case "GLOBAL":
                    name = argument.replace(" ", ".")
                    if name not in NAMES:
                        self._refuse(f"asks for {repr(name)[1:-1][:100]}")
                    stack.append(Global(name))
                case "BINPERSID":
                    stack.append(self._storage(*pop(1)))
                case "REDUCE":
                    stack.append(self._call(*pop(2)))
                case "BUILD":
                    pop(1)  # additional state of a dictionary or of a NumPy number
                    top(dict, Unread)
                case name if name in VALUES:
                    stack.append(argument)
                case name if name in CONSTANTS:
                    stack.append(CONSTANTS[name])
                case name:
                    self._refuse(f"has pickle's instruction {name}")
        raise ValueError("it has no STOP instruction")

    def _refuse(self, request: str) -> NoReturn:
        raise UserError(f"{self.file}: {request}, which gates do not need")

    def _call(self, function: Any, arguments: Any) -> Any:
        """Return the value that stands for the call of a `Global`."""
        if function.name == TENSOR:
            return self._tensor(*arguments[:4])
        if function.name == PARAMETER:
            return arguments[0]
        if function.name == DICTIONARY and not arguments:
            return {}
        if function.name in UNREAD:
            return Unread()
        raise ValueError(f"{function.name} of {len(arguments)} values")

    def _storage(self, description: Any) -> tuple[zipfile.ZipInfo, np.dtype]:
        """Return the entry and the dtype of a storage, given ("storage", kind, name, device, count)."""
        tag, kind, key, _, count = description
        if tag != "storage" or type(key) is not str or type(count) is not int:
            raise ValueError("an array in an unknown storage")
        entry, dtype = self._entry(f"data/{key}"), np.dtype(STORAGES[kind.name])
        if count * dtype.itemsize != entry.file_size:
            raise UserError(
                f"{self.file}: data/{key[:20]} should hold {count} of {dtype}, has {entry.file_size} bytes"
            )
        return entry, dtype

    def _tensor(self, storage: Any, offset: Any, shape: Any, strides: Any) -> Tensor:
        """Return an array. Its numbers must lie within its storage, and must not outnumber the storage's."""
        entry, dtype = storage
        numbers = offset, *shape, *strides
        if len(shape) != len(strides) or len(shape) > MAX_AXES or not all(type(x) is int for x in numbers):
            raise ValueError("an array without a shape")
        count, size = entry.file_size // dtype.itemsize, math.prod(shape)
        last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        if min(numbers) < 0 or size > count or (size and last >= count):
            raise UserError(
                f"{self.file}: an array of shape {shape} and strides {strides}, from number {offset} on, does not lie "
                f"in the {count} numbers of its storage"
            )
        # strides of empty arrays and of axes of size 1 are meaningless, and may be larger than NumPy accepts
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
    """Return an array's shape, or the name of the type of another value, or "nothing"."""
    value = layer.get(name)
    if isinstance(value, Tensor):
        return value.shape
    return "nothing" if value is None else type(value).__name__


def is_torch_file(path: Any) -> bool:
    """Return True if a path is a file, or has a suffix of torch's files and is not a folder."""
    path = Path(path)
    return path.is_file() or (path.suffix in (".pt", ".pth") and not path.is_dir())
