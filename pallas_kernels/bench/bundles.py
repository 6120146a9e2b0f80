"""A TPU kernel's cost as its compiler leaves it: the bundles of instructions of the program that it dumps.

A bundle takes at least one cycle, so the bundles of a loop's body are the least that a turn costs; waiting for memory
comes on top. `flags` go into LIBTPU_INIT_ARGS before libtpu is
loaded.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pallas_kernels.bench.issued import Program


def flags(folder: Path) -> str:
    """For LIBTPU_INIT_ARGS, before libtpu is loaded: it writes its last programs into the folder."""
    return f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final"


class Bundle(NamedTuple):
    """`mark`: LB begins a loop's body, PF what follows a condition; "" nothing. `depth`: in how many loops it is.
    `products`: on the matrix units. `spills`: vector registers stored for want of more."""

    mark: str
    depth: int
    products: int
    spills: int


class Tile(NamedTuple):
    """A straight run of bundles in which there are matrix products."""

    bundles: int
    """How many."""
    spills: int
    """Of registers."""


LINE = re.compile(r"^\s*(?:0x[0-9a-f]+|\d+)\s+([A-Z ]*):([ >]*)\{(.*)")


@dataclass(frozen=True)
class Kernel:
    """One program."""

    bundles: list[Bundle]
    """In the order in which they stand in the listing."""
    listing: str
    """All of it."""

    @functools.cached_property
    def _program(self) -> Program:
        return Program(self.listing)

    def issued(self, operands: Mapping[int, np.ndarray]) -> int:
        """All that are issued, with these operands (`issued.py`)."""
        return int(self._program.issued(operands).sum())

    def tiles(self) -> list[Tile]:
        """The arithmetic of each kind of tile."""
        runs = []
        last = None
        for bundle in self.bundles:
            if last is None or bundle.mark or bundle.depth != last.depth:
                runs.append([])
            runs[-1].append(bundle)
            last = bundle
        return [Tile(len(run), sum(x.spills for x in run)) for run in runs if any(x.products for x in run)]

    def loop(self, depth: int, turns: int) -> int:
        """One turn of the loop at `depth`, the loops in it taken `turns` times each."""
        total = inside = 0
        for mark, level, *_ in self.bundles:
            # What a loop skips at its end, and the empty bundles after a jump, show a lower depth.
            inside = level if mark else max(inside, level)
            total += 0 if inside < depth else turns if inside > depth else 1
        return total


def read(folder: Path, name: str) -> Kernel:
    """The program in the folder in whose name `name` is, the only one."""
    paths = [x for x in folder.glob(f"*{name}*-final_bundles.txt") if "schedule" not in x.name]
    if len(paths) != 1:
        raise LookupError(f"{name}: {len(paths)} programs of that name were dumped, not one")
    listing = paths[0].read_text()
    lines = [x for x in map(LINE.match, listing.splitlines()) if x]
    stem = paths[0].name.rsplit("-", 2)[0]
    (path,) = folder.glob(f"{stem}-*per-bundle-utilization.txt")
    _, header, _, _, *used = path.read_text().splitlines()
    spill = next(at for at, unit in enumerate(header.split(",")) if "SPILL" in unit)
    spills = [int(line.split()[spill]) for line in used if line.strip()]
    return Kernel(
        [
            Bundle(x[1].strip(), x[2].count(">"), x[3].count("vmatmul"), n)
            for x, n in zip(lines, spills, strict=True)
        ],
        listing,
    )
