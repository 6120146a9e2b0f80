"""Files that torch.save wrote, read without torch.

Such a file is a zip. Its `*/data.pkl` is a pickle that says what there is, and its `*/data/N` hold the bytes of arrays.
A pickle is a program that may call anything, so it is not run. The few instructions that containers and arrays are made
of are followed, the names that it asks for stand for fixed meanings, nothing is imported or called, and all else is
refused by name. The arrays take at most twice the memory that the file is large.
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

BEFORE_ZIP = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The first bytes of files that torch wrote before 1.6."""
MOST_AXES = 16
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
"""The names that NumPy's numbers (losses, accuracies) are made of. They may be there, and are not read."""
NAMES = {TENSOR, PARAMETER, DICTIONARY, *UNREAD, *STORAGES}
"""All names that a file may ask for."""
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE"}
"""Instructions that push their argument."""


@dataclass(frozen=True)
class Tensor:
    """An array of a file, before its bytes are read."""

    entry: zipfile.ZipInfo
    dtype: np.dtype
    offset: int
    """The place of the first number in the storage, counted in numbers, as strides are."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Named:
    """A name that a file asked for, with its module."""

    name: str


class Unread:
    """A value that is not needed."""


class TorchFile:
    """An open file, to be used as a context manager. Its `content` are dicts, lists and tuples of `Tensor`s, strings,
    numbers and `Unread`.

    Raises UserError, in one line, for a file that torch does not write, one that is damaged, and one that asks for what
    gates do not need.
    """

    def __init__(self, file: str | Path):
        self.file = Path(file)
        self.bytes = check_regular(self.file)
        try:
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
            self.content = self._follow(self._zip.read(self._entry("data.pkl")))
        except Exception as error:
            self._zip.close()
            self._damaged(error)

    def __enter__(self) -> "TorchFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def read(self, tensor: Tensor) -> Shaped[np.ndarray, "..."]:
        """Return an array's numbers, a view of the bytes that they lie in."""
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
        # layers may share an array (DBTrimKV's last one), which is then read for each
        if total > 2 * self.bytes:
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
        """Return an entry that holds its bytes as they are, as torch's do. A packed one may be larger than the file."""
        entry = self._zip.getinfo(self._folder + name)
        if not entry.file_size == entry.compress_size <= self.bytes:
            raise UserError(f"{self.file}: {name} is packed, which it never is in a file of torch.save's")
        return entry

    def _follow(self, program: bytes) -> Any:
        """Follow a program of pickle's protocol 2, which is torch's, and return the value that it leaves.

        Raises:
            UserError: an instruction or a name that gates do not need.
            Exception: any kind, for a damaged program.
        """
        stack: list[Any] = []
        marks: list[int] = []
        memo: dict[int, Any] = {}
        instructions: Any = pickletools.genops(program)

        def pop(count: int | None = None) -> list[Any]:
            """Remove and return the last values; with no `count` those since the last mark."""
            start = marks.pop() if count is None else len(stack) - count
            if start < (marks[-1] if marks else 0):
                raise ValueError("too few values")
            found = stack[start:]
            del stack[start:]
            return found

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
                        raise ValueError("a key is no word and no number")
                    top(dict).update(zip(pairs[::2], pairs[1::2], strict=True))
                case "APPEND" | "APPENDS" as name:
                    values = pop(1 if name == "APPEND" else None)
                    top(list).extend(values)
                case "GLOBAL":
                    name = argument.replace(" ", ".")
                    if name not in NAMES:
                        self._refuse(f"asks for {repr(name)[1:-1][:100]}")
                    stack.append(Named(name))
                case "BINPERSID":
                    stack.append(self._storage(*pop(1)))
                case "REDUCE":
                    stack.append(self._called(*pop(2)))
                case "BUILD":
                    pop(1)  # the further state of a dictionary or of one of NumPy's numbers
                    top(dict, Unread)
                case name if name in VALUES:
                    stack.append(argument)
                case name if name in CONSTANTS:
                    stack.append(CONSTANTS[name])
                case name:
                    self._refuse(f"has pickle's instruction {name}")
        raise ValueError("it has no end")

    def _refuse(self, what: str) -> NoReturn:
        raise UserError(f"{self.file}: {what}, which is not among what gates need")

    def _called(self, what: Any, arguments: Any) -> Any:
        """Return the value that the call of a name stands for."""
        if what.name == TENSOR:
            return self._tensor(*arguments[:4])
        if what.name == PARAMETER:
            return arguments[0]
        if what.name == DICTIONARY and not arguments:
            return {}
        if what.name in UNREAD:
            return Unread()
        raise ValueError(f"{what.name} of {len(arguments)} values")

    def _storage(self, said: Any) -> tuple[zipfile.ZipInfo, np.dtype]:
        """Return the entry and the dtype of ("storage", kind, name, device, count)."""
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
        """Return an array that lies within its storage, in which its numbers could all have places of their own."""
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
        # strides over nothing or over one index are meaningless, and may be larger than NumPy takes
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
    """Return an array's shape, or a word for what is there instead."""
    found = layer.get(name)
    return found.shape if isinstance(found, Tensor) else "nothing" if found is None else type(found).__name__


def is_torch_file(path: Any) -> bool:
    """Return True if a path is a file's, or named like one of torch's and not a folder's."""
    path = Path(path)
    return path.is_file() or (path.suffix in (".pt", ".pth") and not path.is_dir())
