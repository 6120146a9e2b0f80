"""Times and rates of work, without the time for compiling."""

import functools
import time
from typing import Any

import jax


class _CompileSeconds:
    """Seconds that JAX spent tracing and compiling in this process, from when it was first asked."""

    seconds = 0.0

    def __call__(self, event: str, duration_secs: float, **_: Any) -> None:
        if event.startswith("/jax/core/compile/"):
            self.seconds += duration_secs


@functools.cache
def _compile_seconds() -> _CompileSeconds:
    counter = _CompileSeconds()
    jax.monitoring.register_event_duration_secs_listener(counter)
    return counter


class Stopwatch:
    """Seconds of work between two laps, without those that JAX spent tracing and compiling.

    compiled: True if anything was compiled in the last lap, whose seconds are then less certain.
    """

    def __init__(self):
        self.last = time.perf_counter(), _compile_seconds().seconds
        self.compiled = False

    def lap(self) -> float:
        """Return the seconds since the last lap."""
        before, self.last = self.last, (time.perf_counter(), _compile_seconds().seconds)
        self.compiled = self.last[1] > before[1]
        return max(1e-9, self.last[0] - before[0] - (self.last[1] - before[1]))


class Pace:
    """Tokens per second over several laps. Those in which something was compiled count only where there is no other."""

    def __init__(self):
        self._laps: dict[bool, tuple[int, float]] = {False: (0, 0.0), True: (0, 0.0)}

    def add(self, tokens: int, seconds: float, compiled: bool) -> None:
        """Add a lap of so many tokens."""
        had = self._laps[compiled]
        self._laps[compiled] = had[0] + tokens, had[1] + seconds

    @property
    def per_second(self) -> float | None:
        """Tokens per second; None if there was no lap."""
        return next((tokens / seconds for tokens, seconds in self._laps.values() if tokens), None)
