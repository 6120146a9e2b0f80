"""The cycles of a TPU program of XLA's, from its optimised HLO: as XLA estimates them, or by the bundles issued."""

import collections
import functools
import re
from collections.abc import Callable
from pathlib import Path

from pallas_kernels.bench.issued import Program

UNKNOWN = 1 << 62
"""What XLA writes where it has no estimate, of scatters that it gives to SparseCores: they count as nothing."""


def estimated_cycles(program: str) -> int:
    """Of the whole program, the bodies of its loops as often as they run. Sorts, gathers and scatters have none."""
    return _total(program, _estimate)


def issued_cycles(program: str, folder: Path) -> int:
    """The same by the bundles of what was dumped into the folder, sorts and gathers included.

    Estimated is what has no listing, and what goes where numbers in vectors say.
    """
    listings = collections.defaultdict(list)
    for path in folder.glob("*-final_bundles.txt"):
        if "schedule" not in path.name:
            listings[path.name.split("-", 1)[1].rsplit("-", 2)[0]].append(path)

    def cost(line: str) -> int:
        name = re.match(r"\s*(?:ROOT )?%([\w.-]+) = ", line)
        found = [_issued(path) for path in listings[name[1]]] if name else []
        # of one that was compiled twice the longer
        return max((x for x in found if x is not None), default=_estimate(line))

    return _total(program, cost)


def _estimate(line: str) -> int:
    return sum(n for n in map(int, re.findall(r'"estimated_cycles":"(\d+)"', line)) if n < UNKNOWN)


@functools.cache
def _issued(path: Path) -> int | None:
    try:
        return int(Program(path.read_text()).issued({}).sum())
    except LookupError:
        return None


def _total(program: str, cost: Callable[[str], int]) -> int:
    computations: dict[str, str] = {}
    for block in re.split(r"\n(?=%|ENTRY )", program):
        if match := re.match(r"(ENTRY )?%([\w.-]+) \(", block):
            computations["ENTRY" if match[1] else match[2]] = block

    def total(name: str) -> int:
        text = computations[name]
        cycles = sum(map(cost, text.splitlines()))
        for condition, body in re.findall(r" while\(.*condition=%([\w.-]+), body=%([\w.-]+)", text):
            cycles += _turns(computations[condition]) * total(body)
        return cycles

    return total("ENTRY")


def _turns(condition: str) -> int:
    """A counting loop's number of turns: the one constant that its condition compares the counter with."""
    (turns,) = re.findall(r"constant\((\d+)\)", condition)
    return int(turns)
