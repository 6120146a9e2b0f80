"""Thresholds that keep given shares of held-out tokens, from their priorities."""

import numpy as np
from jaxtyping import Float32

SHARES = 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9
"""The shares of tokens that the rows of a report keep."""
TOLERANCE = 0.02
"""The relative error of a share that is allowed for a threshold with fewer digits."""


def thresholds(priorities: Float32[np.ndarray, " n"]) -> list[float]:
    """Return a threshold for each of `SHARES`, so that this share of the priorities is at least the threshold. It has
    as few digits as `TOLERANCE` allows. Equal priorities are kept or dropped together."""
    ranked = np.sort(priorities)

    def kept(threshold: float) -> float:
        return 1 - np.searchsorted(ranked, np.float32(threshold)) / len(ranked)

    result = []
    for share in SHARES:
        exact = float(ranked[-max(1, round(share * len(ranked)))])
        rounded = (float(f"{exact:.{digits}g}") for digits in range(2, 10))  # nine digits identify a float32
        result.append(next(x for x in rounded if abs(kept(x) - kept(exact)) <= TOLERANCE * share))
    return result
