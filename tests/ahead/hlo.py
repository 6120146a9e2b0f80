"""Read from a compiled program's text what its devices exchange and what its loops launch."""

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Iterator

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
)
WIDTHS = {"pred": 1.0, "token": 0.0}
"""Bytes per number, for the types whose name does not say how many bits they have."""
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_ARRAY = re.compile(r"\b(pred|token|bf16|[suf]\d+|f8\w+|c\d+)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body)=%?([\w.\-]+)|(?:called|branch)_computations=\{([^}]*)\}")


Exchanged = Counter[tuple[str, str]]
"""The "count" and "bytes" of each kind of collective on one device. The bytes are the larger of input and output."""


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str
    """The text after the operands."""
    inside: str
    """The text between the parentheses."""


def exchanged(text: str) -> Exchanged:
    """Return the exchanges in the text of `compiled.as_text()`. Of two branches, the one with more exchanges counts."""
    computations, entry = _parse(text)

    @functools.cache
    def total(name: str) -> Exchanged:
        found: Exchanged = Counter()
        instructions = computations.get(name, [])
        shapes = {one.name: one.shape for one in instructions}
        begun = any('"AsyncCollectiveStart"' in one.rest for one in instructions)
        for one in instructions:
            if "chain_id=" in one.rest and not begun:
                continue  # a TPU's program repeats an asynchronous collective in each part; only the first part counts
            inner = [total(called) for called in _called(one)]
            if one.opcode == "conditional":
                inner = [max(inner, key=lambda branch: branch.total())] if inner else []
            times = _trips(one, computations) if one.opcode == "while" else 1
            for part in [_own(one, shapes), *inner]:
                for key, number in part.items():
                    found[key] += times * number
        return found

    return total(entry)


@dataclasses.dataclass(frozen=True)
class Launched:
    """A kernel on a GPU, or an operation on a TPU."""

    name: str
    loops: tuple[int, ...]
    """The number of iterations of each loop around it, the outermost first."""
    written: int
    """The bytes written. An update in place counts only the new part."""
    sliced: bool
    """True if it does nothing but take a part out of a larger array."""


_NOT_LAUNCHED = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call", "conditional", "after-all",
    "opt-barrier", "partition-id", "copy-done", "async-done", "async-update", "all-gather-done", "all-reduce-done",
}  # fmt: skip
_MOVES = {
    "parameter",
    "constant",
    "bitcast",
    "dynamic-slice",
    "copy",
    "transpose",
    "reshape",
    "tuple",
    "slice",
}


def launched(text: str) -> list[Launched]:
    """Return what the program of `compiled.as_text()` launches, with the loops around it, once for each place in the
    text."""
    computations, entry = _parse(text)

    def walk(name: str, loops: tuple[int, ...]) -> Iterator[Launched]:
        for one in computations.get(name, []):
            if one.opcode == "while":
                body = re.search(r"body=%?([\w.\-]+)", one.rest)
                assert body is not None
                yield from walk(body[1], (*loops, _trips(one, computations)))
            elif one.opcode in ("call", "conditional", "async-start"):
                for called in _called(one):
                    yield from walk(called, loops)
            elif one.opcode not in _NOT_LAUNCHED:
                yield Launched(one.name, loops, _written(one, computations, name), _slices(one, computations))

    return list(walk(entry, ()))


def _body(one: _Instruction, computations: dict[str, list[_Instruction]]) -> list[_Instruction]:
    """Return the instructions inside a fusion, or the instruction itself if it is no fusion."""
    return (
        [x for called in _called(one) for x in computations.get(called, [])]
        if one.opcode == "fusion"
        else [one]
    )


def _written(one: _Instruction, computations: dict[str, list[_Instruction]], inside: str) -> int:
    body = _body(one, computations)
    known = {x.name: x for x in (*computations[inside], *body)}

    def of(x: _Instruction) -> int:
        if x.opcode == "tuple":
            return sum(of(known[name]) for name in x.operands)
        if x.opcode in ("bitcast", "copy") and x.operands and x is not one:
            return of(known[x.operands[0]])
        if x.opcode in ("dynamic-update-slice", "scatter"):
            return _bytes(known[x.operands[1 if x.opcode == "dynamic-update-slice" else 2]].shape)
        # an operand that a kernel changes in place is not counted as written
        aliased = re.search(r"output_to_operand_aliasing={(.*?\))}", x.rest)
        operands = re.findall(r"\((\d+),", aliased[1]) if aliased else ()
        return _bytes(x.shape) - sum(_bytes(known[x.operands[int(index)]].shape) for index in operands)

    return of(body[-1])


def _slices(one: _Instruction, computations: dict[str, list[_Instruction]]) -> bool:
    body = _body(one, computations)
    large = [x for x in body if _bytes(x.shape) > 64]
    return any(x.opcode == "dynamic-slice" for x in body) and all(x.opcode in _MOVES for x in large)


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
    return _Instruction(
        left.removeprefix("ROOT ").lstrip("%"), shape, opcode, operands, call[stop + 1 :], inside
    )


def _closing(text: str) -> int:
    """Return the index at which the parenthesis that `text` begins with is closed."""
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
    """Return how often a loop runs: XLA's known count, else the one integer its condition compares with, else 1."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', one.rest):
        return int(known[1])
    condition = re.search(r"condition=%?([\w.\-]+)", one.rest)
    limits = {
        int(x.inside)
        for x in computations.get(condition[1] if condition else "", [])
        if x.opcode == "constant" and re.fullmatch(r"\d+", x.inside) and x.shape.startswith(("s32", "u32"))
    }
    return limits.pop() if len(limits) == 1 else 1


def _bytes(shape: str) -> int:
    """Return the bytes of all arrays of a shape, which may be a tuple's."""
    total = 0.0
    for kind, axes in _ARRAY.findall(shape):
        bits = re.match(r"[a-z]+(\d+)", kind)
        width = WIDTHS[kind] if bits is None else int(bits[1]) / 8
        total += width * math.prod(int(axis) for axis in axes.split(",") if axis)
    return int(total)


def _own(one: _Instruction, shapes: dict[str, str]) -> Exchanged:
    kind = one.opcode.removesuffix("-start")
    if kind not in COLLECTIVES:
        return Counter()
    given = sum(_bytes(shapes.get(name, "")) for name in one.operands)
    # the result of a collective that is only started is a tuple that holds its operands, too
    made = _bytes(one.shape) - (given if one.opcode.endswith("-start") and one.shape.startswith("(") else 0)
    return Counter({(kind, "count"): 1, (kind, "bytes"): max(given, made)})
