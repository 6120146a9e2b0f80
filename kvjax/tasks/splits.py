"""The split of a task's contexts into contexts to compare on and contexts to calibrate on."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvjax.errors import UserError

Item = TypeVar("Item")

FIRST_SEED = 1_000_000
"""The first seed of contexts for run seed 0. Each further run seed adds a million."""
CALIBRATION_SEED = 500_000
"""The seed offset of calibration contexts."""


@dataclass(frozen=True)
class Split:
    """A part of a task's contexts.

    No context is used for both comparison and calibration, and neither is any text that the model predicts. Haystacks
    around records and needles may share text.
    """

    seed: int
    """The run's seed."""
    compared: int
    """The number of contexts on which the run compares policies."""
    calibration: bool = False
    """True for calibration contexts."""
    skipped: int = 0
    """The number of calibration contexts that were used before. If contexts are not made from seeds, those at the end
    are taken instead of the first, so that they differ if there are enough."""

    @property
    def first(self) -> int:
        """The seed of its first context, if contexts are made from seeds."""
        offset = CALIBRATION_SEED if self.calibration else 0
        return FIRST_SEED * (1 + self.seed) + offset + self.skipped

    def take_published(
        self, items: Sequence[tuple[Hashable, Item]], count: int, where: str, description: str
    ) -> list[tuple[int, Item]]:
        """Return `count` items of a published dataset: the first ones to compare, or the next ones to calibrate on, or
        the last ones if some of these were used before.

        Items about the same text are numbered alike, and no text is used for both.

        Args:
            items: each item with its text, or anything else that identifies it.
            where: the source of the items.
            description: the items, as a plural.

        Raises:
            UserError: there are too few.
        """
        extra = ""
        if self.calibration:
            compared = {text for text, _ in items[: self.compared]}
            items = [item for item in items[self.compared :] if item[0] not in compared]
            extra = f" and {count} more to calibrate on, about other texts"
        if count > len(items):
            total = len(items) + (self.compared if self.calibration else 0)
            raise UserError(
                f"{where}: there are {total} {description}, needed {self.compared} to compare{extra}; give fewer "
                "--samples"
            )
        taken = items[-count:] if self.skipped else items[:count]
        numbers: dict[Hashable, int] = {}
        return [(numbers.setdefault(text, len(numbers)), item) for text, item in taken]
