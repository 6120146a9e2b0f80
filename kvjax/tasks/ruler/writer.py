"""Writers of RULER's examples, before a tokenizer and a length are known."""

import zlib
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from kvjax.tasks.prompt import Example


@dataclass(frozen=True)
class Supply:
    """A limited number of units."""

    most: int
    of: str
    """Description of the units, such as "pairs of words"."""


@runtime_checkable
class ExampleWriter(Protocol):
    """A task's text, deterministic from a seed and a number of haystack units (lines, sentences, words, documents)."""

    @property
    def name(self) -> str: ...

    @property
    def fewest(self) -> int:
        """The least number of units with which an example works."""
        ...

    @property
    def supply(self) -> Supply | None:
        """The limit on units; None if there is none."""
        ...

    def write(self, seed: int, units: int) -> Example: ...


def generator(recipe: ExampleWriter, seed: int) -> np.random.Generator:
    """Return a task's random generator for a seed. Two tasks share none."""
    return np.random.default_rng((seed, zlib.crc32(recipe.name.encode())))
