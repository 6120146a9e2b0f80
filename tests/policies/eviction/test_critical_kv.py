"""CriticalKV over SnapKV against its two stages in float64, from a real prefill."""

import numpy as np

from kvjax.policies import SnapKV, make_policy
from tests.policies import published
from tests.policies.captured import OBSERVED
from tests.policies.eviction.kept_sets import RATIO, assert_published


def test_scores_and_kept_sets_are_the_published_ones(model, prompts, captured):
    policy = make_policy("critical_kv", eviction=SnapKV(OBSERVED), model=model, ratio=RATIO)

    def score(c, kept):
        newest = np.arange(c.k.shape[1]) >= c.k.shape[1] - OBSERVED
        return published.critical(c, published.snapkv(c, OBSERVED), newest, kept)

    assert_published(policy, score, model, prompts, captured, last=OBSERVED)
