"""The interface of RULER's tasks without a tokenizer and a length."""

import zlib
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from kvjax.tasks.prompt import Example


@dataclass(frozen=True)
class Supply:
    """A limited supply of units."""

    most: int
    unit: str
    """Description of the units, such as "pairs of words"."""


@runtime_checkable
class ExampleWriter(Protocol):
    """Writes a task's examples, deterministic from a seed and a number of haystack units (lines, words, documents)."""

    @property
    def name(self) -> str: ...

    @property
    def fewest(self) -> int:
        """The least number of units of an example."""
        ...

    @property
    def supply(self) -> Supply | None:
        """The limit on units; None if there is none."""
        ...

    def write(self, seed: int, units: int) -> Example: ...


def generator(writer: ExampleWriter, seed: int) -> np.random.Generator:
    """Return a task's random generator for a seed. Tasks have different generators."""
    return np.random.default_rng((seed, zlib.crc32(writer.name.encode())))
