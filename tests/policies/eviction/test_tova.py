"""Test TOVA against its formula in float64, from a real prefill."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from kvjax.policies import TOVA, make_policy
from kvjax.policies.eviction import queries
from tests.policies import published
from tests.policies.eviction.kept_sets import RATIO, assert_published
from tests.policies.steps import stored


def test_scores_and_kept_sets_are_the_published_ones(model, prompts, captured):
    policy = make_policy({"tova": {"ratio": RATIO}}, model=model)
    assert_published(policy, lambda c, kept: published.tova(c), model, prompts, captured, last=1)


def test_heads_with_different_tokens_are_scored_apart():
    view = stored(np.random.default_rng(0).normal(size=(2, 9, 4)), [1.0], 9)
    view = dataclasses.replace(view, observations=jnp.ones((1, 4, 1, 4)), causal=False)
    scores = np.asarray(TOVA().score((), view))
    np.testing.assert_array_equal(scores, queries.attention(view))
    assert not np.allclose(scores[:, 0], scores[:, 1])
