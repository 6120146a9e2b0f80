"""How far a long computation is: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from kvjax.train.metrics import LINE_SECONDS, clock


class Pace:
    """As a context, on stderr: `total` of a `unit`, `before` of them done by an earlier run."""

    def __init__(self, what: str, unit: str, total: int, before: int):
        self._what, self._unit, self._total, self._before, self._done = what, unit, total, before, before
        columns = TextColumn(what), BarColumn(), TextColumn("{task.fields[pace]}")
        self._bar = Progress(*columns, console=Console(stderr=True)) if sys.stderr.isatty() else None
        self._began, self._said = time.monotonic(), 0.0

    def __enter__(self) -> "Pace":
        if self._bar is not None:
            self._bar.start()
            self._bar.add_task(self._what, total=self._total, completed=self._before, pace="compiling")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: int) -> None:
        """So many more are done."""
        self._done += count
        now = time.monotonic()
        speed = (self._done - self._before) / max(now - self._began, 1e-9)
        left = clock((self._total - self._done) / speed)
        pace = f"{speed:.0f} {self._unit}/s  {left} left"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done, pace=pace)
        elif now - self._said >= LINE_SECONDS or self._done == self._total:
            self._said = now
            text = f"{self._what} {self._done:,}/{self._total:,} {self._unit}  {pace}"
            print(text, file=sys.stderr, flush=True)
