"""Test SnapKV and WG-KV's form of it against their formulas in float64, from a real prefill."""

import pytest

from kvjax.policies import make_policy
from tests.policies import published
from tests.policies.captured import OBSERVED
from tests.policies.eviction.kept_sets import RATIO, assert_published


@pytest.mark.parametrize(
    ("name", "how"), [("snapkv", {}), ("snapkv_of_groups", {"group": "max", "pooling": "max"})]
)
def test_scores_and_kept_sets_are_the_published_ones(model, prompts, captured, name, how):
    policy = make_policy({"snapkv": {"ratio": RATIO, "observed": OBSERVED, **how}}, model=model)
    score = getattr(published, name)
    assert_published(policy, lambda c, kept: score(c, OBSERVED), model, prompts, captured, last=OBSERVED)
