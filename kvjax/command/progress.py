"""A bar on a terminal with the lines of what is done above it, plain lines elsewhere."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar


class Progress:
    """As a context, on stderr; `total` of `what`, `finished` of them before."""

    def __init__(self, what: str, total: int, finished: int):
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Bar(*columns, console=Console(stderr=True)) if sys.stderr.isatty() else None
        self._task = None if self._bar is None else self._bar.add_task(what, total=total, completed=finished)
        self._total, self._finished, self._began = total, finished, time.monotonic()

    def __enter__(self) -> "Progress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def done(self, line: str) -> None:
        """One more is finished: what to say of it."""
        self._finished += 1
        if self._bar is not None and self._task is not None:
            self._bar.console.print(line, highlight=False, markup=False)
            self._bar.update(self._task, completed=self._finished)
        else:
            seconds = time.monotonic() - self._began
            print(f"{self._finished}/{self._total} ({seconds:.0f} s)  {line}", file=sys.stderr, flush=True)
