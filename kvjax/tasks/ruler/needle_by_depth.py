"""A needle in a haystack by depth (Kamradt's test), with the wording of RULER's niah_single_2."""

import dataclasses
from dataclasses import dataclass

from kvjax.tasks.prompt import Example
from kvjax.tasks.ruler.haystack import Essays
from kvjax.tasks.ruler.needles import Needles

DEPTHS = tuple(range(0, 101, 10))
"""Depths in percent of the characters."""


@dataclass(frozen=True)
class NeedleByDepth:
    """The needle of seed i is at depth `DEPTHS[i % 11]` of the haystack, from 0 (its start) to 100 (its end).

    The kind of a question is the depth, from 0 to 1.
    """

    haystacks: tuple[Essays, ...]
    """One haystack for each depth."""
    name: str = "needle"
    fewest = 1
    supply = None

    def write(self, seed: int, units: int) -> Example:
        index = seed % len(DEPTHS)
        example = Needles(self.name, self.haystacks[index]).write(seed, units)
        (question,) = example.questions
        return dataclasses.replace(
            example, questions=(dataclasses.replace(question, kind=f"{DEPTHS[index] / 100:g}"),)
        )


def needle_by_depth(essays: Essays) -> NeedleByDepth:
    """Return the writer of needles in a text."""
    return NeedleByDepth(
        tuple(dataclasses.replace(essays, depths=(depth,), depth_of="characters") for depth in DEPTHS)
    )
