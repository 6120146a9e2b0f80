"""Thresholds that keep given shares of held-out tokens, from their priorities."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32

SHARES = 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9
"""The shares of tokens that the rows of a report keep."""
CLOSE = 0.02
"""The error of a share, relative to it, that a threshold with fewer digits may have."""


def thresholds(priorities: Float32[np.ndarray, " n"], shares: Sequence[float] = SHARES) -> list[float]:
    """Return a threshold for each share, which that share of the priorities reaches. It has the fewest digits that keep
    about as many (`CLOSE`). If equal priorities cross the share, all of them are kept."""
    ranked = np.sort(priorities)

    def kept(threshold: float) -> float:
        return 1 - np.searchsorted(ranked, np.float32(threshold)) / len(ranked)

    found = []
    for share in shares:
        exact = float(ranked[-max(1, round(share * len(ranked)))])
        digits = (float(f"{exact:.{count}g}") for count in range(2, 10))  # nine are float32's own
        found.append(next(x for x in digits if abs(kept(x) - kept(exact)) <= CLOSE * share))
    return found
