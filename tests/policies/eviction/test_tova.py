"""Test TOVA against its formula in float64, from a real prefill."""

from kvjax.policies import make_policy
from tests.policies import published
from tests.policies.eviction.kept_sets import RATIO, assert_published


def test_scores_and_kept_sets_are_the_published_ones(model, prompts, captured):
    policy = make_policy({"tova": {"ratio": RATIO}}, model=model)
    assert_published(policy, lambda c, kept: published.tova(c), model, prompts, captured, last=1)
