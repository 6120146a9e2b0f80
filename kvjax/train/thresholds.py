"""Thresholds at which what held-out tokens are worth keeps given shares of them."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32

SHARES = 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9
"""Of the tokens, that the rows of a report keep."""
CLOSE = 0.02
"""Of a share, by which a threshold in fewer digits may miss it."""


def thresholds(priorities: Float32[np.ndarray, " n"], shares: Sequence[float] = SHARES) -> list[float]:
    """For each share a number that so much of the priorities reaches, in the fewest digits that keep as many. Where
    equal ones cross the share, all of them are kept."""
    ranked = np.sort(priorities)

    def kept(threshold: float) -> float:
        return 1 - np.searchsorted(ranked, np.float32(threshold)) / len(ranked)

    found = []
    for share in shares:
        exact = float(ranked[-max(1, round(share * len(ranked)))])
        digits = (float(f"{exact:.{count}g}") for count in range(2, 10))  # nine are float32's own
        found.append(next(x for x in digits if abs(kept(x) - kept(exact)) <= CLOSE * share))
    return found
