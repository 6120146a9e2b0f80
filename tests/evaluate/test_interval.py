"""Tests of score intervals: independent answers, answers that share contexts, and how often the truth lies inside."""

import numpy as np
import pytest

from kvjax.evaluate.interval import mean_interval


def test_independent_answers_have_wilson_s_interval():
    # 15 of 20 with z = t(19) = 2.093024: center (0.75 + z²/40) / (1 + z²/20)
    z2 = 2.0930240544**2
    half = np.sqrt(z2 * (0.75 * 0.25 / 20 + z2 / 1600)) / (1 + z2 / 20)
    middle = (0.75 + z2 / 40) / (1 + z2 / 20)
    low, high = mean_interval([1.0] * 15 + [0.0] * 5, [1] * 20)
    assert (low, high) == pytest.approx((middle - half, middle + half))


def test_identical_answers_about_a_context_count_once():
    assert mean_interval([6.0, 0.0, 6.0, 6.0], [6] * 4) == pytest.approx(
        mean_interval([1.0, 0.0, 1.0, 1.0], [1] * 4)
    )
    # contexts that all have half of their answers right tell as much as independent answers, and no more
    apart, alike = mean_interval([3.0] * 8, [6] * 8), mean_interval([6.0, 0.0] * 4, [6] * 8)
    assert alike[0] < apart[0] < 0.5 < apart[1] < alike[1]


def test_perfect_scores_still_have_a_wide_interval():
    low, high = mean_interval([6.0] * 4, [6] * 4)
    assert high == 1
    assert low < 0.4
    assert mean_interval([5.0], [6]) == (0, 1)


def test_intervals_cover_the_true_mean_at_95_percent():
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(2000):
        # half of the contexts are easy and half are hard, so that the mean is 0.7
        p = rng.choice([0.5, 0.9], size=12)
        low, high = mean_interval(rng.binomial(4, p).astype(float).tolist(), [4] * 12)
        inside += low <= 0.7 <= high
    assert 0.93 < inside / 2000 < 0.99
