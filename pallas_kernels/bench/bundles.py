"""A TPU kernel's cost as its compiler leaves it: the bundles of instructions of the program that it dumps.

A bundle takes at least one cycle, so the bundles of a loop's body are the least that a turn costs; waiting for memory
comes on top. `flags` go into LIBTPU_INIT_ARGS before libtpu is
loaded.
"""

import re
from pathlib import Path
from typing import NamedTuple


def flags(folder: Path) -> str:
    """For LIBTPU_INIT_ARGS, before libtpu is loaded: it writes its last programs into the folder."""
    return f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final"


class Bundle(NamedTuple):
    """`mark`: LB begins a loop's body, PF what follows a condition; "" nothing. `depth`: in how many loops it is.
    `products`: on the matrix units. `copies`: begun from HBM. `spills`: vector registers stored for want of more."""

    mark: str
    depth: int
    products: int
    copies: int
    spills: int


class Tile(NamedTuple):
    """A straight run of bundles in which there are matrix products."""

    bundles: int
    """How many."""
    spills: int
    """Of registers."""


LINE = re.compile(r"^\s*(?:0x[0-9a-f]+|\d+)\s+([A-Z ]*):([ >]*)\{(.*)")


class Kernel(NamedTuple):
    """One program."""

    bundles: list[Bundle]
    """In the order in which they stand in the listing."""

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

    def copying(self) -> float:
        """The bundles that beginning a copy takes in the loop that begins most."""
        bodies: list[list[Bundle]] = [[]]
        for bundle in self.bundles:
            if bundle.mark:
                bodies.append([])
            bodies[-1].append(bundle)
        copies, bundles = max((sum(x.copies for x in body), -len(body)) for body in bodies)
        return -bundles / copies

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
    lines = [x for x in map(LINE.match, paths[0].read_text().splitlines()) if x]
    stem = paths[0].name.rsplit("-", 2)[0]
    (path,) = folder.glob(f"{stem}-*per-bundle-utilization.txt")
    _, header, _, _, *used = path.read_text().splitlines()
    spill = next(at for at, unit in enumerate(header.split(",")) if "SPILL" in unit)
    spills = [int(line.split()[spill]) for line in used if line.strip()]
    return Kernel(
        [
            Bundle(x[1].strip(), x[2].count(">"), x[3].count("vmatmul"), x[3].count("dma.hbm_to_vmem"), n)
            for x, n in zip(lines, spills, strict=True)
        ]
    )
