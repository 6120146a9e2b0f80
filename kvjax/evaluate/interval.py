"""Confidence intervals of scores, if several scores may belong to questions about one context."""

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit

CONFIDENCE = 0.95


def mean_interval(
    right: Sequence[float] | np.ndarray, answers: Sequence[int] | np.ndarray
) -> tuple[float, float]:
    """Return the 95% interval of the mean score.

    It is Wilson's interval for the effective number of answers, which is their number divided by the design effect
    (Kish, Survey Sampling, 1965, Sec. 8.2). Answers about one context are alike, and the design effect is the factor by
    which the variance of the mean exceeds that of independent answers. The effective number is at least the number of
    contexts and at most the number of answers. Student's t with contexts − 1 degrees of freedom replaces the normal
    quantile.

    Args:
        right: the sum of the scores, each from 0 to 1, for each context.
        answers: the number of answers for each context.
    """
    scores, counts = np.asarray(right, np.float64), np.asarray(answers, np.float64)
    contexts, total = len(counts), float(counts.sum())
    if contexts < 2:
        return 0.0, 1.0
    mean = float(scores.sum() / total)
    variance = contexts / (contexts - 1) * float(((scores - counts * mean) ** 2).sum()) / total**2
    effective = mean * (1 - mean) / max(variance, 1 / total**2)
    effective = min(max(effective, contexts), total)
    squared = float(stdtrit(contexts - 1, (1 + CONFIDENCE) / 2)) ** 2 / effective
    center = (mean + squared / 2) / (1 + squared)
    half_width = math.sqrt(squared * (mean * (1 - mean) + squared / 4)) / (1 + squared)
    return max(0.0, center - half_width), min(1.0, center + half_width)
