"""What a compiled program's text says: matrix products and exchanges between devices, those in loops as often as the
loop runs. (XLA's own `cost_analysis` counts a loop's body once, and a model's layers are a loop.)"""

import dataclasses
import functools
import math
import re
from collections import Counter

COLLECTIVES = "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute"
WIDTHS = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "token": 0}
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_ARRAY = re.compile(r"\b(pred|token|bf16|[suf]\d+|f8\w+|c\d+)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body)=%?([\w.\-]+)|(?:called|branch)_computations=\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Counted:
    """What one run of a program does on a device."""

    flops: float = 0.0
    """Of matrix products outside kernels, a multiplication and an addition each."""
    exchanged: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    """By kind of collective, its "count" and its "bytes": the larger of what goes in and what comes out."""

    def plus(self, other: "Counted", times: int = 1) -> "Counted":
        """Both, the other one `times` times."""
        exchanged = self.exchanged.copy()
        for key, number in other.exchanged.items():
            exchanged[key] += times * number
        return Counted(self.flops + times * other.flops, exchanged)


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str
    """What stands behind the operands."""
    inside: str
    """What stands between the parentheses."""


def count(text: str) -> Counted:
    """What `compiled.as_text()` says of one device. Of branches the one with more products counts."""
    computations, entry = _parse(text)

    @functools.cache
    def total(name: str) -> Counted:
        found = Counted()
        instructions = computations.get(name, [])
        shapes = {one.name: one.shape for one in instructions}
        for one in instructions:
            found = found.plus(_own(one, shapes))
            inner = [total(called) for called in _called(one)]
            if one.opcode == "conditional":
                inner = [max(inner, key=lambda branch: branch.flops)] if inner else []
            times = _trips(one, computations) if one.opcode == "while" else 1
            for part in inner:
                found = found.plus(part, times)
        return found

    return total(entry)


def _parse(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    computations: dict[str, list[_Instruction]] = {}
    entry, own = "", None
    for line in text.splitlines():
        if own is None:
            if match := _HEADER.match(line):
                own = computations.setdefault(match[2], [])
                entry = match[2] if match[1] else entry
        elif line == "}":
            own = None
        elif one := _instruction(line):
            own.append(one)
    return computations, entry


def _instruction(line: str) -> _Instruction | None:
    left, equals, right = line.strip().partition(" = ")
    if not equals:
        return None
    end = _closing(right) + 1 if right.startswith("(") else right.index(" ")
    shape, call = right[:end], right[end:].lstrip()
    opcode, paren, _ = call.partition("(")
    if not paren:
        return None
    call = call[len(opcode) :]
    stop = _closing(call)
    inside = call[1:stop]
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    return _Instruction(left.removeprefix("ROOT ").lstrip("%"), shape, opcode, operands, call[stop + 1 :], inside)


def _closing(text: str) -> int:
    """Where the parenthesis that `text` begins with ends."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return index
    return len(text)


def _called(one: _Instruction) -> list[str]:
    names: list[str] = []
    for single, several in _CALLED.findall(one.rest):
        names += [single] if single else [name.strip().lstrip("%") for name in several.split(",")]
    return [name for name in names if name]


def _trips(one: _Instruction, computations: dict[str, list[_Instruction]]) -> int:
    """How often a loop runs: as XLA says, else the one whole number that its condition compares with; else 1."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', one.rest):
        return int(known[1])
    condition = re.search(r"condition=%?([\w.\-]+)", one.rest)
    limits = {
        int(x.inside)
        for x in computations.get(condition[1] if condition else "", [])
        if x.opcode == "constant" and re.fullmatch(r"\d+", x.inside) and x.shape.startswith(("s32", "u32"))
    }
    return limits.pop() if len(limits) == 1 else 1


def _sizes(shape: str) -> list[tuple[float, list[int]]]:
    """Each array of a shape, perhaps a tuple's: bytes of a number, and axes."""
    found = []
    for kind, axes in _ARRAY.findall(shape):
        digits = re.sub(r"\D", "", kind)
        width = WIDTHS.get(kind, 1 if kind.startswith("f8") else int(digits or 8) / 8)
        found.append((width, [int(axis) for axis in axes.split(",") if axis]))
    return found


def _bytes(shape: str) -> int:
    return int(sum(width * math.prod(axes) for width, axes in _sizes(shape)))


def _own(one: _Instruction, shapes: dict[str, str]) -> Counted:
    kind = one.opcode.removesuffix("-start")
    if kind in COLLECTIVES:
        given = sum(_bytes(shapes.get(name, "")) for name in one.operands)
        # the tuple of one that is only begun holds its operands, too
        made = _bytes(one.shape) - (given if one.opcode.endswith("-start") and one.shape.startswith("(") else 0)
        return Counted(0.0, Counter({(kind, "count"): 1, (kind, "bytes"): max(given, made)}))
    arrays = [_sizes(shapes.get(name, "")) for name in one.operands[:2]]
    out = _sizes(one.shape)
    if len(arrays) < 2 or not all(arrays) or not out:
        return Counted()
    (_, left), (_, right), (_, result) = arrays[0][0], arrays[1][0], out[0]
    if one.opcode == "dot":
        return Counted(2.0 * math.prod(result) * _contracted(left, r"lhs_contracting_dims=\{([\d,]*)\}", one.rest))
    if one.opcode == "custom-call" and "__cublas" in one.rest:
        axes = r'"lhs_contracting_dimensions":\[([^\]]*)\]'
        return Counted(2.0 * math.prod(result) * _contracted(left, axes, one.rest))
    if one.opcode == "convolution":
        return Counted(_convolution(left, right, result, one.rest))
    return Counted()


def _contracted(left: list[int], pattern: str, rest: str) -> int:
    axes = re.search(pattern, rest)
    return math.prod(left[int(axis)] for axis in re.findall(r"\d+", axes[1])) if axes else 0


def _convolution(left: list[int], right: list[int], result: list[int], rest: str) -> float:
    """A TPU's name for every product. Axes of a batch come as spatial ones, padded and dilated: of those only the
    places count where kernel and input meet."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", rest)
    if labels is None:
        return 0.0
    of_left, of_right, of_result = labels.groups()
    flops = 2.0 * result[of_result.index("b")] * result[of_result.index("f")] * right[of_right.index("i")]
    window = re.search(r"window=\{([^}]*)\}", rest)
    told = dict(re.findall(r"(\w+)=(\S+)", window[1])) if window else {}

    def numbers(name: str, default: int, axis: int) -> int:
        return int(told[name].split("x")[axis]) if name in told else default

    spatial = [label for label in of_result if label.isdigit()]
    for axis, label in enumerate(sorted(spatial)):
        size, wide, made = (
            left[of_left.index(label)],
            right[of_right.index(label)],
            result[of_result.index(label)],
        )
        low = int(told["pad"].split("x")[axis].split("_")[0]) if "pad" in told else 0
        stride, spread, apart = (
            numbers("stride", 1, axis),
            numbers("lhs_dilate", 1, axis),
            numbers("rhs_dilate", 1, axis),
        )
        flops *= _meetings(size, wide, made, low, stride, spread, apart)
    return flops


@functools.cache
def _meetings(size: int, wide: int, made: int, low: int, stride: int, spread: int, apart: int) -> int:
    """Pairs of an output's place and a kernel's that fall on an input's."""
    last = (size - 1) * spread
    found = 0
    for k in range(wide):
        first = k * apart - low
        if spread == 1:
            least = max(0, -(first // stride))
            most = min(made - 1, (last - first) // stride)
            found += max(0, most - least + 1)
        else:
            found += sum(
                0 <= first + o * stride <= last and (first + o * stride) % spread == 0 for o in range(made)
            )
    return found
