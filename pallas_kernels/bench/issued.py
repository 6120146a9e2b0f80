"""Runs the scalar half of a TPU program as its compiler lists it, and counts the bundles that it issues.

Where a program goes depends on numbers in scalar registers and scalar memory, and the listing says which registers
those are: so loops, branches, copies that are started and awaited, and the beginning and end of every row are counted
as often as they run, whatever the vectors hold. A bundle takes at least one cycle; waiting comes on top.

Addresses are symbols: each operand and each allocation begins far from all others. Of what is copied only the way from
an operand that is given into scalar memory is followed.
"""

import collections
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|\d+)\s+[A-Z ]*:[ >]*\{", re.M)
LABEL = re.compile(r"Start(?:/End empty)? region (\d+)")
COMMENT = re.compile(r"/\*.*?\*/", re.S)
STATEMENT = re.compile(r"(?:%(\S+) = )?([\w.$]+) ?(.*)")
PREDICATE = re.compile(r"\((!?)%(\w+)(?:, %\w+)?\),?")
"""Of a statement; a number behind it is what the register holds otherwise, which is what it holds."""
DELAY = 4
"""Bundles behind a branch that are issued before it is taken."""
GRANULE = 8
"""Words in which copies are counted."""
NEAR = 1 << 38
"""Numbers are below, addresses above."""
OPERAND, ALLOCATION = 1 << 60, 1 << 44
"""How far operands, and allocations, are from each other."""
MOST = 20_000_000
"""Bundles that a program may issue: more are a loop without end."""
ROWS = 16
"""Granules between two addresses in vector memory, of which copies take the granule's."""


def _number(x: int) -> int:
    """An int32, or an address."""
    return x if abs(x) >= NEAR else (x + 2**31) % 2**32 - 2**31


def _unsigned(x: int) -> int:
    return x if abs(x) >= NEAR else x % 2**32


def _added(x: int, y: int) -> int:
    return _number(x + y)


ARITHMETIC: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("smov", "pmov"), lambda x: x),
    "sadd.s32": _added,
    "ssub.s32": lambda x, y: _number(x - y),
    "smul.u32": lambda x, y: _number(x * y),
    "sand.u32": lambda x, y: x & y,
    "sor.u32": lambda x, y: x | y,
    "sxor.u32": lambda x, y: x ^ y,
    "sshll.u32": lambda x, y: _number(x << y),
    "sshrl.u32": lambda x, y: _number(_unsigned(x) >> y),
    "sshra.s32": lambda x, y: x >> y,
    "smin.u32": lambda x, y: _number(min(_unsigned(x), _unsigned(y))),
    "smax.u32": lambda x, y: _number(max(_unsigned(x), _unsigned(y))),
    "smin.s32": min,
    "smax.s32": max,
    **dict.fromkeys((f"scalar_lea.{x}" for x in ("vmem", "hbm", "smem", "sflag")), _added),
    "pand": lambda x, y: x and y,
    "por": lambda x, y: x or y,
    "pxor": lambda x, y: x != y,
    "pnand": lambda x, y: not (x and y),
    "pneg": lambda x: not x,
    "scalar_select": lambda p, x, y: x if p else y,
    # a semaphore's count, which at a program's end is looked at
    "vpop.sfrf": lambda *_: 0,
}
COMPARED: dict[str, Callable[[int, int], bool]] = {
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
}
NO_MEANING = re.compile(r"sphi|vphi|int_to_ptr.*")
"""What the compiler says of a register that stays the same."""


class Statement(NamedTuple):
    """What one scalar unit does in a bundle."""

    kind: str
    """set, store, branch or copy."""
    when: tuple[str, bool] | None
    """The predicate register that it depends on, and what that must be."""
    target: Any
    """A register; where a branch goes."""
    values: Callable[["Machine"], Any]
    """What is set, stored (an address and a number) or copied (from, granules, to)."""


class Machine:
    """The state: registers, scalar memory by its addresses, and the operands that are known."""

    def __init__(self, operands: Mapping[int, np.ndarray]):
        self.registers: dict[str, int] = collections.defaultdict(int)
        self.memory: dict[int, int] = {}
        self.operands = {index: x.ravel() for index, x in operands.items()}

    def copy(self, source: int, granules: int, target: int) -> None:
        """Into scalar memory. Vector memory's addresses are in granules by then."""
        scale = ROWS if source >= OPERAND * ROWS else 1
        index, offset = divmod(source // scale, OPERAND)
        found = self.operands.get(index - 1)
        if found is None:
            return
        first = (offset * scale + source % scale) * GRANULE
        for at, word in enumerate(found[first : first + granules * GRANULE].tolist()):
            self.memory[target + at] = word


class Program:
    """A listing of final bundles, ready to run."""

    def __init__(self, listing: str):
        starts = [*BUNDLE.finditer(listing)]
        ends = [x.start() for x in starts[1:]] + [len(listing)]
        bodies = [listing[x.end() : end] for x, end in zip(starts, ends, strict=True)]
        self._labels = {label: at for at, body in enumerate(bodies) for label in LABEL.findall(body)}
        # Regions without bundles of their own at the very end have no label: what comes there is the exit.
        self._exit = len(bodies) - 1 if bodies and "exit bundle" in bodies[-1] else None
        self._bundles = [[x for x in map(self._statement, _texts(body)) if x] for body in bodies]

    def issued(self, operands: Mapping[int, np.ndarray]) -> np.ndarray:
        """How often each bundle is issued, with these operands' words, by index, as they lie in memory.

        Raises:
            LookupError: a loop without end.
        """
        machine = Machine(operands)
        counts, at, branch, left = np.zeros(len(self._bundles), np.int64), 0, 0, 0
        for _ in range(MOST):
            if at == len(self._bundles):
                return counts
            counts[at] += 1
            sets, stores = [], []
            for kind, when, target, values in self._bundles[at]:
                if when is not None and bool(machine.registers[when[0]]) != when[1]:
                    continue
                if kind == "set":
                    sets.append((target, values(machine)))
                elif kind == "store":
                    stores.append(values(machine))
                elif kind == "branch":
                    branch, left = target, DELAY + 1
                else:
                    machine.copy(*values(machine))
            machine.registers.update(sets)
            machine.memory.update(stores)
            left -= 1
            at = branch if left == 0 else at + 1
        raise LookupError(f"the program has not ended after {MOST} bundles")

    def _statement(self, text: str) -> Statement | None:
        """None: of vectors, or without meaning here."""
        match = STATEMENT.fullmatch(text)
        if match is None:
            raise LookupError(f"a statement that is none: {text}")
        name, op, rest = match.groups()
        when = None
        if found := PREDICATE.search(rest):
            when = _register(found[2]), found[1] != "!"
            rest = f"{rest[: found.start()].strip()} {rest[found.end() :].strip()}".strip().rstrip(",")
        target = _register(name or "")
        given = [x.strip() for x in rest.split(",")] if rest else []
        if op == "sbr.rel":
            label = rest.rpartition("$region")[2]
            to = self._labels.get(label, self._exit)
            if to is None:
                raise LookupError(f"a branch to what is not in the listing: {text}")
            return Statement("branch", when, to, _nothing)
        if op == "sst":
            place, value = rest.removeprefix("[smem:[").split("]] ")
            return Statement("store", when, None, _all(_sum(place), _value(value)))
        if op.startswith("dma.") and op.endswith("_to_smem"):
            source, granules, place = [x for x in given if not x.startswith("[thread")][:3]
            return Statement("copy", when, None, _all(_value(source), _value(granules), _value(place)))
        if not re.fullmatch(r"[sp]\d+", target) or NO_MEANING.fullmatch(op):
            return None
        if op.startswith("inlined_call_operand"):
            (index,) = re.findall(r"index: (\d+)", text)
            return Statement("set", when, target, lambda _: (int(index) + 1) * OPERAND)
        if op == "sld":
            place = _sum(rest.removeprefix("[smem:[").rstrip("]"))
            return Statement("set", when, target, lambda machine: machine.memory.get(place(machine), 0))
        arguments = _all(*map(_value, given))
        if op.startswith("scmp."):
            compare, kind = COMPARED[op.split(".")[1]], _unsigned if ".u32" in op else int
            return Statement("set", when, target, lambda x: compare(*map(kind, arguments(x))))
        if op not in ARITHMETIC:
            raise LookupError(f"an operation that is not known: {text}")
        return Statement("set", when, target, lambda machine: ARITHMETIC[op](*arguments(machine)))


def _texts(body: str) -> Sequence[str]:
    body = COMMENT.sub("", body)
    return [" ".join(x.split()) for x in body[: body.rindex("}")].split(";;") if x.strip()]


def _register(name: str) -> str:
    """The physical one: `%s4550_s18` is s18."""
    return name.rpartition("_")[2]


def _nothing(machine: Machine) -> None: ...


def _all(*values: Callable[[Machine], int]) -> Callable[[Machine], list[int]]:
    return lambda machine: [x(machine) for x in values]


def _sum(text: str) -> Callable[[Machine], int]:
    parts = [_value(x.strip()) for x in text.rstrip("]").split(" + ")]
    return lambda machine: sum(x(machine) for x in parts)


@functools.cache
def _allocation(name: str) -> int:
    return (int(re.sub(r"\D", "", name)) + 1) * ALLOCATION + (OPERAND >> 1 if name.endswith("spill") else 0)


def _value(text: str) -> Callable[[Machine], int]:
    """Of a register, a number, or a place in an allocation."""
    text = re.sub(r"(?<=\S) \[#allocation\w+\]$", "", text)
    if text.startswith("%"):
        name = _register(text)
        return lambda machine: machine.registers[name]
    if text.startswith("["):
        return _sum(text.strip("[]"))
    if text.startswith("#"):
        place = _allocation(text)
        return lambda machine: place
    number = _number(int(text.removeprefix("$"), 0))
    return lambda machine: number
