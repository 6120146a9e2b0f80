"""Read a compiled program's text: the collectives of its devices, and the kernels that its loops launch."""

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
"""Bytes per number of the types whose name does not contain the number of bits."""
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
    """Return the exchanges in the text of `compiled.as_text()`. A conditional counts as its branch with most
    exchanges."""
    computations, entry = _parse(text)

    @functools.cache
    def total(name: str) -> Exchanged:
        sums: Exchanged = Counter()
        instructions = computations.get(name, [])
        shapes = {instruction.name: instruction.shape for instruction in instructions}
        asynchronous = any('"AsyncCollectiveStart"' in instruction.rest for instruction in instructions)
        for instruction in instructions:
            # TPU programs repeat an asynchronous collective in each of its parts. Only the first part counts.
            if "chain_id=" in instruction.rest and not asynchronous:
                continue
            inner = [total(called) for called in _called(instruction)]
            if instruction.opcode == "conditional":
                inner = [max(inner, key=lambda branch: branch.total())] if inner else []
            iterations = _trips(instruction, computations) if instruction.opcode == "while" else 1
            for part in [_exchanges_of(instruction, shapes), *inner]:
                for key, number in part.items():
                    sums[key] += iterations * number
        return sums

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
    """True if it only takes a part out of a larger array."""


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
    """Return the launches in the text of `compiled.as_text()`, each with the loops around it."""
    computations, entry = _parse(text)

    def walk(name: str, loops: tuple[int, ...]) -> Iterator[Launched]:
        for instruction in computations.get(name, []):
            if instruction.opcode == "while":
                body = re.search(r"body=%?([\w.\-]+)", instruction.rest)
                assert body is not None
                yield from walk(body[1], (*loops, _trips(instruction, computations)))
            elif instruction.opcode in ("call", "conditional", "async-start"):
                for called in _called(instruction):
                    yield from walk(called, loops)
            elif instruction.opcode not in _NOT_LAUNCHED:
                yield Launched(
                    instruction.name,
                    loops,
                    _written(instruction, computations, name),
                    _slices(instruction, computations),
                )

    return list(walk(entry, ()))


def _body(instruction: _Instruction, computations: dict[str, list[_Instruction]]) -> list[_Instruction]:
    """Return the instructions inside a fusion, or the instruction itself if it is no fusion."""
    return (
        [x for called in _called(instruction) for x in computations.get(called, [])]
        if instruction.opcode == "fusion"
        else [instruction]
    )


def _written(instruction: _Instruction, computations: dict[str, list[_Instruction]], inside: str) -> int:
    body = _body(instruction, computations)
    by_name = {x.name: x for x in (*computations[inside], *body)}

    def written(x: _Instruction) -> int:
        if x.opcode == "tuple":
            return sum(written(by_name[name]) for name in x.operands)
        if x.opcode in ("bitcast", "copy") and x.operands and x is not instruction:
            return written(by_name[x.operands[0]])
        if x.opcode in ("dynamic-update-slice", "scatter"):
            return _bytes(by_name[x.operands[1 if x.opcode == "dynamic-update-slice" else 2]].shape)
        # Operands that a kernel changes in place do not count as written.
        aliased = re.search(r"output_to_operand_aliasing={(.*?\))}", x.rest)
        operands = re.findall(r"\((\d+),", aliased[1]) if aliased else ()
        return _bytes(x.shape) - sum(_bytes(by_name[x.operands[int(index)]].shape) for index in operands)

    return written(body[-1])


def _slices(instruction: _Instruction, computations: dict[str, list[_Instruction]]) -> bool:
    body = _body(instruction, computations)
    large = [x for x in body if _bytes(x.shape) > 64]
    return any(x.opcode == "dynamic-slice" for x in body) and all(x.opcode in _MOVES for x in large)


def _parse(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    computations: dict[str, list[_Instruction]] = {}
    entry, instructions = "", None
    for line in text.splitlines():
        if instructions is None:
            if match := _HEADER.match(line):
                instructions = computations.setdefault(match[2], [])
                entry = match[2] if match[1] else entry
        elif line == "}":
            instructions = None
        elif instruction := _instruction(line):
            instructions.append(instruction)
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
    """Return the index of the parenthesis that closes the one at the start of `text`."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return index
    return len(text)


def _called(instruction: _Instruction) -> list[str]:
    names: list[str] = []
    for single, several in _CALLED.findall(instruction.rest):
        names += [single] if single else [name.strip().lstrip("%") for name in several.split(",")]
    return [name for name in names if name]


def _trips(instruction: _Instruction, computations: dict[str, list[_Instruction]]) -> int:
    """Return the number of iterations of a loop: XLA's known count, else the only integer in its condition, else 1."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.rest):
        return int(known[1])
    condition = re.search(r"condition=%?([\w.\-]+)", instruction.rest)
    limits = {
        int(x.inside)
        for x in computations.get(condition[1] if condition else "", [])
        if x.opcode == "constant" and re.fullmatch(r"\d+", x.inside) and x.shape.startswith(("s32", "u32"))
    }
    return limits.pop() if len(limits) == 1 else 1


def _bytes(shape: str) -> int:
    """Return the bytes of all arrays of a shape, which may be a tuple."""
    total = 0.0
    for kind, axes in _ARRAY.findall(shape):
        bits = re.match(r"[a-z]+(\d+)", kind)
        width = WIDTHS[kind] if bits is None else int(bits[1]) / 8
        total += width * math.prod(int(axis) for axis in axes.split(",") if axis)
    return int(total)


def _exchanges_of(instruction: _Instruction, shapes: dict[str, str]) -> Exchanged:
    kind = instruction.opcode.removesuffix("-start")
    if kind not in COLLECTIVES:
        return Counter()
    operand_bytes = sum(_bytes(shapes.get(name, "")) for name in instruction.operands)
    # The result of a collective's start is a tuple that contains its operands, too.
    result_bytes = _bytes(instruction.shape) - (
        operand_bytes if instruction.opcode.endswith("-start") and instruction.shape.startswith("(") else 0
    )
    return Counter({(kind, "count"): 1, (kind, "bytes"): max(operand_bytes, result_bytes)})
