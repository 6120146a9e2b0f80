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
    """Description of the units: "sentences in …"."""


@runtime_checkable
class ExampleWriter(Protocol):
    """A task's text, deterministic from a seed and a number of haystack units (lines, sentences, words, documents)."""

    @property
    def name(self) -> str: ...

    @property
    def fewest(self) -> int:
        """Units below which an example would not be one."""
        ...

    @property
    def supply(self) -> Supply | None:
        """None if there is no end of units."""
        ...

    def write(self, seed: int, units: int) -> Example: ...


def generator(recipe: ExampleWriter, seed: int) -> np.random.Generator:
    """A task's randomness of a seed; two tasks share none."""
    return np.random.default_rng((seed, zlib.crc32(recipe.name.encode())))
