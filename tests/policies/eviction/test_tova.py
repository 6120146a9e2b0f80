"""Test TOVA against its formula in float64, from a real prefill."""

import pytest

from kvjax.errors import UserError
from kvjax.policies import make_policy
from tests.policies import published
from tests.policies.eviction.kept_sets import RATIO, assert_published


def test_scores_and_kept_sets_are_the_published_ones(model, prompts, captured):
    policy = make_policy({"tova": {"ratio": RATIO}}, model=model)
    assert_published(policy, lambda c, kept: published.tova(c), model, prompts, captured, last=1)


def test_heads_with_different_tokens_are_refused(model):
    with pytest.raises(
        UserError, match="tova averages attention over the heads of a layer, which hold different"
    ):
        make_policy("random:ratio=0.5,window=8+tova:entries=9", model=model)
