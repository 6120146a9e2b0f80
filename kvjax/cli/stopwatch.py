"""Times and rates of work, without the time for compilation."""

import functools
import time
from typing import Any

import jax


class _CompileSeconds:
    """Seconds that JAX spent tracing and compiling in this process since the first stopwatch."""

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

    `compiled` is True if anything was compiled in the last lap, so that its seconds are less certain.
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
    """Tokens per second over several laps. Laps with compilation count only if there are no others."""

    def __init__(self):
        self._laps: dict[bool, tuple[int, float]] = {False: (0, 0.0), True: (0, 0.0)}

    def add(self, tokens: int, seconds: float, compiled: bool) -> None:
        """Add a lap."""
        total_tokens, total_seconds = self._laps[compiled]
        self._laps[compiled] = total_tokens + tokens, total_seconds + seconds

    @property
    def per_second(self) -> float | None:
        """Tokens per second; None if there was no lap."""
        return next((tokens / seconds for tokens, seconds in self._laps.values() if tokens), None)
