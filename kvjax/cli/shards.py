"""Shares of work for machines that run independently. Importing this module does not import jax."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterable, Iterator
from typing import TypeVar

from kvjax.errors import UserError

T = TypeVar("T")
INDEX_VARIABLES = "SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX", "SKYPILOT_NODE_RANK"
"""Variables with which batch systems give a job its index in an array of jobs, from 0."""


@dataclasses.dataclass(frozen=True, order=True)
class Shard:
    """One of `count` shares of work."""

    index: int
    """The index, from 0 to count - 1."""
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Parse `0/8`, or `8` if a variable of the batch system has the index. Raises UserError."""
        index, slash, count = text.rpartition("/")
        if not slash:
            index = next((os.environ[name] for name in INDEX_VARIABLES if name in os.environ), "")
        if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
            advice = "" if slash else f"; a count alone takes the index from {', '.join(INDEX_VARIABLES)}"
            raise UserError(
                f"--shard {text}: expected an index from 0 and a count above it, such as 0/8{advice}"
            )
        return cls(int(index), int(count))

    def of(self, work: Iterable[T]) -> Iterator[T]:
        """Yield the items of this share. Items go to the shares in turn."""
        return itertools.islice(work, self.index, None, self.count)

    @property
    def folder(self) -> str:
        """The name of the share's folder in the folder of an evaluation."""
        return f"shard-{self.index}-of-{self.count}"


WHOLE = Shard(0, 1)
"""The share that is all of the work."""
