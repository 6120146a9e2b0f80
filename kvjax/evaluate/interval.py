"""Confidence intervals of scores. Several of the scores may belong to questions about one context."""

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit

CONFIDENCE = 0.95


def mean_interval(right: Sequence[float], answers: Sequence[int]) -> tuple[float, float]:
    """Return the 95% interval of the mean score.

    It is Wilson's interval for the effective number of answers: their number over the design effect (Kish, Survey
    Sampling, 1965, Sec. 8.2), which says how much more the mean varies than that of independent answers would, since
    answers about one context are alike. The effective number is never below the number of contexts, nor above that of
    the answers. Student's t with contexts − 1 degrees of freedom takes the place of the normal quantile.

    Args:
        right: the sum of the scores, each from 0 to 1, of every context.
        answers: the number of answers of every context.
    """
    scores, counts = np.asarray(right, np.float64), np.asarray(answers, np.float64)
    contexts, total = len(counts), float(counts.sum())
    if contexts < 2:
        return 0.0, 1.0
    mean = float(scores.sum() / total)
    varies = contexts / (contexts - 1) * float(((scores - counts * mean) ** 2).sum()) / total**2
    effective = mean * (1 - mean) / max(varies, 1 / total**2)
    effective = min(max(effective, contexts), total)
    squared = float(stdtrit(contexts - 1, (1 + CONFIDENCE) / 2)) ** 2 / effective
    middle = (mean + squared / 2) / (1 + squared)
    half = math.sqrt(squared * (mean * (1 - mean) + squared / 4)) / (1 + squared)
    return max(0.0, middle - half), min(1.0, middle + half)
