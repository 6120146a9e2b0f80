"""The progress of a long computation: a bar on a terminal, occasional lines elsewhere."""

import sys
import time

import jax
from rich.progress import TextColumn

from kvjax.cli.progress import Counted
from kvjax.train.metrics import LINE_SECONDS, clock


class Pace(Counted):
    """A context manager that shows progress and speed on stderr, in the first of several processes. `before`: the units
    of `total` that were done earlier."""

    def __init__(self, label: str, unit: str, total: int, before: int):
        super().__init__(label, total, before, TextColumn("{task.fields[pace]}"), pace="compiling")
        self._label, self._unit, self._before, self._last_line = label, unit, before, 0.0

    def advance(self, count: int) -> None:
        """Record that `count` more units are done."""
        self._finished += count
        now = time.monotonic()
        speed = (self._finished - self._before) / max(now - self._began, 1e-9)
        left = clock((self._total - self._finished) / speed)
        pace = f"{speed:.0f} {self._unit}/s  {left} left"
        if self._bar is not None:
            self._bar.update(self._task, completed=self._finished, pace=pace)
        elif jax.process_index() == 0 and (
            now - self._last_line >= LINE_SECONDS or self._finished == self._total
        ):
            self._last_line = now
            text = f"{self._label} {self._finished:,}/{self._total:,} {self._unit}  {pace}"
            print(text, file=sys.stderr, flush=True)
