"""Test a needle's depth."""

import numpy as np
import pytest

from kvjax.tasks import (
    Needle,
    builtin_task,
)


def test_the_needle_is_at_its_depth(vocabulary):
    task = builtin_task(Needle)
    for seed in range(5):
        sample = task.sample(seed, 512)
        (at,) = np.flatnonzero(sample.context == vocabulary.record)
        assert at / len(sample.context) == pytest.approx(float(sample.questions[0].kind), abs=0.02)
