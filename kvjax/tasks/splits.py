"""Which of a task's contexts are compared, and which others are calibrated on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvjax.errors import UserError

Item = TypeVar("Item")

FIRST_SEED = 1_000_000
"""Seeds of the contexts start here, those of run seed 1 a million further, and so on."""
CALIBRATION_SEED = 500_000
"""Seed offset of the contexts that are calibrated on."""


@dataclass(frozen=True)
class Split:
    """A part of a task's contexts. No context is both compared and calibrated on, nor is any text that is predicted;
    the haystacks around records and needles may share text.
    """

    seed: int
    """The run's."""
    compared: int
    """How many contexts the run compares."""
    calibration: bool = False
    """Whether these are the others."""
    skipped: int = 0
    """Contexts that are made from seeds start so much further."""

    @property
    def first(self) -> int:
        """The seed of its first context, where contexts are made from seeds."""
        further = CALIBRATION_SEED if self.calibration else 0
        return FIRST_SEED * (1 + self.seed) + further + self.skipped

    def of_published(self, items: Sequence[Item], count: int, where: str, what: str) -> Sequence[Item]:
        """`count` of a published data set's: the first are compared, those after them are calibrated on.

        Raises UserError, which says `where` there are too few of `what`.
        """
        first = self.compared if self.calibration else 0
        if first + count > len(items):
            after = f" and {count} more to calibrate on" if self.calibration else ""
            raise UserError(
                f"{where}: there are {len(items)} {what}, needed {self.compared} to compare{after}; give fewer "
                "--samples"
            )
        return items[first : first + count]
