"""Progress on stderr: a bar with lines of finished items above it on a terminal, and plain lines elsewhere."""

import sys
import time
from types import TracebackType
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

C = TypeVar("C", bound="Counted")


class Counted:
    """A context that shows on stderr how many of `total` items are finished.

    Args:
        what: the label of the bar.
        finished: the number of items that were finished before.
        columns: columns after the bar, which is shown on a terminal only.
        fields: the initial values of the columns' text fields.
    """

    def __init__(self, what: str, total: int, finished: int, *columns: ProgressColumn, **fields: Any):
        self._total, self._finished, self._began = total, finished, time.monotonic()
        self._bar = None
        if sys.stderr.isatty():
            self._bar = Bar(TextColumn(what), BarColumn(), *columns, console=Console(stderr=True))
            self._task = self._bar.add_task(what, total=total, completed=finished, **fields)

    def __enter__(self: C) -> C:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


class Progress(Counted):
    """The progress of items that finish one by one, with a line for each."""

    def __init__(self, what: str, total: int, finished: int):
        super().__init__(what, total, finished, MofNCompleteColumn(), TimeElapsedColumn())

    def done(self, line: str) -> None:
        """Count one more item as finished, and print a line about it."""
        self._finished += 1
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
            self._bar.update(self._task, completed=self._finished)
        else:
            seconds = time.monotonic() - self._began
            print(f"{self._finished}/{self._total} ({seconds:.0f} s)  {line}", file=sys.stderr, flush=True)
