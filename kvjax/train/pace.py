"""How far a long computation is: a bar on a terminal, a line now and then elsewhere."""

import sys
import time

from rich.progress import TextColumn

from kvjax.cli.progress import Counted
from kvjax.train.metrics import LINE_SECONDS, clock


class Pace(Counted):
    """As a context, on stderr: `total` of a `unit`, `before` of them done by an earlier run."""

    def __init__(self, what: str, unit: str, total: int, before: int):
        super().__init__(what, total, before, TextColumn("{task.fields[pace]}"), pace="compiling")
        self._what, self._unit, self._before, self._said = what, unit, before, 0.0

    def advance(self, count: int) -> None:
        """So many more are done."""
        self._finished += count
        now = time.monotonic()
        speed = (self._finished - self._before) / max(now - self._began, 1e-9)
        left = clock((self._total - self._finished) / speed)
        pace = f"{speed:.0f} {self._unit}/s  {left} left"
        if self._bar is not None:
            self._bar.update(self._task, completed=self._finished, pace=pace)
        elif now - self._said >= LINE_SECONDS or self._finished == self._total:
            self._said = now
            text = f"{self._what} {self._finished:,}/{self._total:,} {self._unit}  {pace}"
            print(text, file=sys.stderr, flush=True)
