"""How long the work took, whatever there was to compile."""

import time
from typing import Any

import jax


class Stopwatch:
    """Seconds of work between two looks, without those that JAX spent tracing and compiling.

    compiled: whether anything was compiled before the last look; its seconds are then less certain.
    """

    def __init__(self):
        self.compiling, self.compiled = 0.0, False
        jax.monitoring.register_event_duration_secs_listener(self._compiled)
        self.last = time.perf_counter(), 0.0

    def _compiled(self, event: str, duration_secs: float, **_: Any) -> None:
        if event.startswith("/jax/core/compile/"):
            self.compiling += duration_secs

    def lap(self) -> float:
        """Seconds since the last lap."""
        before, self.last = self.last, (time.perf_counter(), self.compiling)
        self.compiled = self.last[1] > before[1]
        return max(1e-9, self.last[0] - before[0] - (self.last[1] - before[1]))
