"""The split of a task's contexts into those that are compared and those that are calibrated on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvjax.errors import UserError

Item = TypeVar("Item")

FIRST_SEED = 1_000_000
"""The first seed of contexts. With run seed 1 the seeds start a million later, and so on."""
CALIBRATION_SEED = 500_000
"""The seed offset of the contexts that are calibrated on."""


@dataclass(frozen=True)
class Split:
    """A part of a task's contexts. No context is both compared and calibrated on, nor is any text that is predicted;
    the haystacks around records and needles may share text.
    """

    seed: int
    """The run's seed."""
    compared: int
    """The number of contexts that the run compares."""
    calibration: bool = False
    """True for the contexts that are calibrated on."""
    skipped: int = 0
    """The number of seeds that are skipped, if contexts are made from seeds."""

    @property
    def first(self) -> int:
        """The seed of its first context, if contexts are made from seeds."""
        further = CALIBRATION_SEED if self.calibration else 0
        return FIRST_SEED * (1 + self.seed) + further + self.skipped

    def of_published(self, items: Sequence[Item], count: int, where: str, what: str) -> Sequence[Item]:
        """Return `count` items of a published data set: the first to compare, or those after them to calibrate on.

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
