"""Tokens per second, over several laps."""


class Pace:
    """Laps in which something was compiled count only where there are no others."""

    def __init__(self):
        self._laps: dict[bool, tuple[int, float]] = {False: (0, 0.0), True: (0, 0.0)}

    def add(self, tokens: int, seconds: float, compiled: bool) -> None:
        """A lap of so many tokens."""
        had = self._laps[compiled]
        self._laps[compiled] = had[0] + tokens, had[1] + seconds

    @property
    def per_second(self) -> float | None:
        """None: there was no lap."""
        return next((tokens / seconds for tokens, seconds in self._laps.values() if tokens), None)
