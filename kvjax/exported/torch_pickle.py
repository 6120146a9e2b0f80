"""The pickle inside of what torch.save wrote, followed without being run.

A pickle is a program that may call anything. Here the few instructions that containers and arrays are made of are
followed; the names that it asks for stand for fixed meanings, nothing is imported or called, and all else is refused by
name.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from kvjax.errors import UserError

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
"""Bytes of arrays, by what torch calls them."""
TENSOR = "torch._utils._rebuild_tensor_v2"
PARAMETER = "torch._utils._rebuild_parameter"
DICTIONARY = "collections.OrderedDict"
UNREAD = {
    *("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"),
    *("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"),
    *("numpy.ndarray", "numpy.dtype", "_codecs.encode"),
}
"""What NumPy's numbers are made of (losses, accuracies). They may be there, and are not read."""
NAMES = {TENSOR, PARAMETER, DICTIONARY, *UNREAD, *STORAGES}
"""All that a file may ask for."""
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
NUMBERS = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"}


@dataclass(frozen=True)
class Named:
    """A name that a file asked for."""

    name: str
    """With its module."""


class Unread:
    """A value that nobody needs."""


def follow(
    program: bytes, where: Any, storage: Callable[[Any], Any], tensor: Callable[[Any, Any, Any, Any], Any]
) -> Any:
    """What the instructions leave, of pickle's protocol 2, which is torch's: dicts, lists and tuples of arrays, words
    and numbers, and `Unread`.

    Args:
        where: the file, for messages.
        storage: gives what a persistent id stands for. tensor: makes an array of that, an offset, a shape and strides.

    Raises:
        UserError: an instruction or a name that gates do not need.
        Exception: of any kind, where it is damaged.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    instructions: Any = pickletools.genops(program)

    def pop(count: int | None = None) -> list[Any]:
        """The last values, or those since the last mark."""
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
                    asked = repr(name)[1:-1][:100]
                    raise UserError(f"{where}: asks for {asked}, which is not among what gates need")
                stack.append(Named(name))
            case "BINPERSID":
                stack.append(storage(*pop(1)))
            case "REDUCE":
                what, arguments = pop(2)
                stack.append(_made(what, arguments, tensor))
            case "BUILD":
                pop(1)  # what a dictionary, or a number of NumPy's, knows besides
                top(dict, Unread)
            case "BINUNICODE":
                stack.append(argument)
            case name if name in NUMBERS:
                stack.append(argument)
            case name if name in CONSTANTS:
                stack.append(CONSTANTS[name])
            case name:
                raise UserError(
                    f"{where}: has pickle's instruction {name}, which is not among what gates need"
                )
    raise ValueError("it has no end")


def _made(what: Any, arguments: Any, tensor: Callable[[Any, Any, Any, Any], Any]) -> Any:
    """What the call of a name stands for."""
    if what.name == TENSOR:
        return tensor(*arguments[:4])
    if what.name == PARAMETER:
        return arguments[0]
    if what.name == DICTIONARY and not arguments:
        return {}
    if what.name in UNREAD:
        return Unread()
    raise ValueError(f"{what.name} of {len(arguments)} values")
