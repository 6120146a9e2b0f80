"""Metrics of a run: a progress bar on a terminal, plain lines elsewhere, `metrics.jsonl`, and TensorBoard events.

Values are read one step late, when the next step is already queued, so that the device never waits.
"""

import importlib.util
import json
import math
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from kvjax.errors import UserError
from kvjax.files import write_text

ESTIMATE_AFTER = 10
"""The number of steps after which a run estimates when it will end."""
LINE_SECONDS = 10.0
"""The seconds between two plain lines."""
RESERVED = "step", "seconds", "tokens_per_second", "validation"
"""The keys of a line of `metrics.jsonl` in addition to a recipe's scalars, which may not have these names."""
FINITE = "finite"
"""The name of a step's value that is True if its loss and gradients are finite. It is checked but not written."""
RECENT_STEPS = 33
"""The number of steps over which speed is averaged. It is small, so that compilation soon drops out of the average."""


class NotFiniteError(Exception):
    """A number of the run is not finite after `step` updates. `what`: a text that says which."""

    def __init__(self, step: int, what: str):
        super().__init__(f"step {step}: {what}")
        self.step, self.what = step, what


class Metrics:
    """The log of a run, as a context manager: `step` takes each step's values, `note` occasional measurements, `say` a
    line of text.

    Lines of `metrics.jsonl` are {"step": …, "seconds": …, values…}, or {"step": …, "seconds": …, name: {values…}} for
    a note. Lines and TensorBoard events of steps from `first` on, which a killed run has left, are dropped.

    Args:
        total, first: the number of steps of the run, and the step at which it starts.
        shown: the names to show, in order, with their formats.
        tensorboard: also write TensorBoard events (see `check_tensorboard`).
        quiet: write nothing at all (processes other than the first).
        unit: the unit of a step's `tokens`.
    """

    def __init__(
        self,
        out: Path,
        *,
        total: int,
        first: int,
        shown: Mapping[str, str],
        tensorboard: bool = False,
        quiet: bool = False,
        unit: str = "tokens",
    ):
        self._total, self._first, self._shown, self._quiet = total, first, shown, quiet
        self._unit = unit
        self._events = None if quiet or not tensorboard else _event_writer(out, first)
        self._file = None if quiet else _open_log(out / "metrics.jsonl", first)
        self._bar: _Bar | None = None
        self._started = self._last_line = time.monotonic()
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT_STEPS)
        self._pending: tuple[int, Any, int] | None = None

    def __enter__(self) -> "Metrics":
        if not self._quiet and sys.stderr.isatty():
            self._bar = _Bar(self._total, self._first)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._write_pending()
        if self._bar is not None:
            self._bar.stop()
        if self._events is not None:
            self._events.close()
        if self._file is not None:
            self._file.close()

    def step(self, step: int, values: dict[str, jax.Array], *, tokens: int) -> None:
        """Take the device values of step `step` (counted from 0), which processes `tokens` tokens, and record those of
        the step before.

        Raises:
            NotFiniteError: a value or the gradient (`FINITE`) of the step before is not finite.
        """
        self._write_pending()
        self._pending = (step, values, tokens)

    def flush(self) -> None:
        """Record the values of the last step and return once all records are on disk, so that a checkpoint of step n
        is saved after the values of step n. Raises NotFiniteError as `step` does."""
        self._write_pending()
        if self._file is not None:
            os.fsync(self._file.fileno())

    def note(self, step: int, name: str, values: dict[str, float]) -> None:
        """Record a measurement under its own name, after the values of step `step`."""
        self._write_pending()
        self._write({"step": step, "seconds": round(time.monotonic() - self._started, 3), name: values})
        if self._events is not None:
            for key, value in values.items():
                self._events.add_scalar(f"{name}/{key}", value, step)

    def _write_pending(self) -> None:
        if self._pending is None:
            return
        step, on_device, tokens = self._pending
        self._pending = None
        values = {name: float(value) for name, value in jax.device_get(on_device).items()}
        finite = values.pop(FINITE, True)
        check_numbers(step + 1, values)
        if not finite:
            raise NotFiniteError(step + 1, "the gradient is not finite")
        if self._quiet:
            return
        now = time.monotonic()
        self._recent.append((now, tokens))
        elapsed = now - self._recent[0][0]
        speed = sum(count for _, count in list(self._recent)[1:]) / elapsed if elapsed else 0.0
        seconds = round(now - self._started, 3)
        self._write({"step": step, "seconds": seconds, "tokens_per_second": round(speed, 1), **values})
        if self._events is not None:
            for name, value in (values | {"tokens_per_second": speed}).items():
                self._events.add_scalar(name, value, step)
        self._show(step, values, speed, now)

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def say(self, text: str) -> None:
        """Print a line of text; if there is a bar, above it."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def _show(self, step: int, values: dict[str, float], speed: float, now: float) -> None:
        shown = [f"{name} {values[name]:{form}}" for name, form in self._shown.items() if name in values]
        done = len(self._recent) - 1
        left = (now - self._recent[0][0]) / max(done, 1) * (self._total - 1 - step)
        if step - self._first + 1 == ESTIMATE_AFTER and self._total - 1 > step:
            end = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + left))
            self.say(f"after {ESTIMATE_AFTER} steps: {clock(left)} left, it ends about {end}")
        speed_and_time = [f"{speed:.0f} {self._unit}/s", f"{clock(left)} left"] if done else []
        if self._bar is not None:
            self._bar.show(step + 1, "  ".join(shown), "  ".join(speed_and_time))
        elif now - self._last_line >= LINE_SECONDS or step in (self._first, self._total - 1):
            self._last_line = now
            self.say("  ".join([f"step {step + 1}/{self._total}", *shown, *speed_and_time]))


def check_numbers(step: int, values: Mapping[str, float], what: str = "") -> None:
    """Raise NotFiniteError for the first value that is not finite after `step` updates."""
    for name, value in values.items():
        if not math.isfinite(value):
            raise NotFiniteError(step, f"{what}{name} is {value}")


class _Bar(Progress):
    """A progress bar with a line of numbers below it, so that both fit a narrow terminal."""

    def __init__(self, total: int, first: int):
        self._numbers = "compiling"
        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[pace]}"),
        )
        super().__init__(*columns, console=Console(stderr=True))
        self._task = self.add_task("training", total=total, completed=first, pace="")

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield Text(self._numbers)

    def show(self, completed: int, numbers: str, pace: str) -> None:
        self._numbers = numbers
        self.update(self._task, completed=completed, pace=pace)


def clock(seconds: float) -> str:
    """Return seconds as minutes:seconds, or hours:minutes:seconds."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _open_log(file: Path, first: int) -> Any:
    lines = file.read_text().splitlines() if first and file.is_file() else []
    before = [line for line in lines if _step_of(line) < first]
    write_text(file, "".join(line + "\n" for line in before))
    return file.open("a")


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError):  # a line that a killed run did not finish
        return float("inf")


def check_tensorboard() -> None:
    """Raise UserError if tensorboardX is not installed."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise UserError("--tensorboard needs tensorboardX: pip install 'kvjax[tensorboard]'")


def _event_writer(out: Path, first: int) -> Any:
    from tensorboardX import SummaryWriter

    if not first:  # events of a run that left no checkpoint
        shutil.rmtree(out / "tensorboard", ignore_errors=True)
    return SummaryWriter(str(out / "tensorboard"), purge_step=first)
