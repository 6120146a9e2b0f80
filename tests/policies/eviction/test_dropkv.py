"""Test DropKV against attention without each entry in float64, from a real prefill, and by examples with the numbers
written out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.inference import prefill
from kvjax.policies import DropKV, make_policy
from tests.policies import published
from tests.policies.captured import OBSERVED, PAGE
from tests.policies.eviction.kept_sets import RATIO, assert_published
from tests.policies.steps import stored


@pytest.mark.parametrize(("pool", "pooling"), [(7, "average"), (11, "max")])
def test_scores_and_kept_sets_are_the_published_ones(model, prompts, captured, pool, pooling):
    how = {"observed": OBSERVED, "pool": pool, "pooling": pooling}
    policy = make_policy({"dropkv": {"ratio": RATIO, **how}}, model=model)
    assert_published(
        policy, lambda c, kept: published.dropkv(c, **how), model, prompts, captured, last=OBSERVED
    )


def scores(attention, values):
    """Return the scores of entries with these values that one query, the newest, pays this attention."""
    entries = len(values)
    view = dataclasses.replace(
        stored(np.eye(entries)[None], [1.0], entries),
        v=jnp.asarray(values, jnp.float32)[None, None],
        observations=jnp.tile(jnp.log(jnp.asarray(attention)) * entries**0.5, (1, 2, 1, 1)),
    )
    return np.asarray(jax.jit(DropKV(observed=1, pool=1).score)((), view))[0, 0]


@pytest.mark.parametrize("method", ["dropkv", "r_kv"])
def test_a_prompt_shorter_than_the_observed_tokens_is_compacted(model, method):
    """Some observed queries do not exist, and with R-KV there are no keys before them."""
    policy = make_policy(f"{method}:observed=32,entries=16", model=model)
    cache = prefill(model, [np.arange(20)], policy=policy, page_size=PAGE)
    np.testing.assert_array_equal(cache.layers.length[:, 0], 16)


def test_a_worked_example():
    """The output is (2, 1). It would be (0, 2), (8/3, 0) and (8/3, 4/3)."""
    found = scores([0.5, 0.25, 0.25], [[4, 0, 0], [0, 4, 0], [0, 0, 0]])
    np.testing.assert_allclose(found, [5, 13 / 9, 5 / 9], rtol=1e-5)


def test_an_entry_with_nearly_all_attention_has_an_exact_score():
    """Without it only the values of the others would be left, so that its score is the squared distance to them."""
    found = scores([1 - 2e-4, 1e-4, 1e-4], [[64, 1, 0], [0, 64, 0], [0, 64, 0]])
    np.testing.assert_allclose(
        found[0], (64**2 + 63**2) * (1 - 2e-4) ** 2 / (1 + 1e-6 / 2e-4) ** 2, rtol=1e-2
    )
