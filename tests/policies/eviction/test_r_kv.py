"""Test R-KV and Fast KVzip's form of it against their formulas in float64, from a real prefill."""

import numpy as np
import pytest

from kvjax import inference
from kvjax.policies import make_policy
from tests.policies import published
from tests.policies.captured import PAGE
from tests.policies.eviction.kept_sets import RATIO, assert_published


@pytest.mark.parametrize(
    ("how", "balance", "first"),
    [({}, 0.07, 0), ({"balance": 0.1, "sink": 4}, 0.1, 4)],
    ids=["r_kv", "r_kv_of_fast_kvzip"],
)
def test_scores_and_kept_sets_are_the_published_ones(model, prompts, captured, how, balance, first):
    policy = make_policy({"r_kv": {"ratio": RATIO, **how}}, model=model)

    def score(c, kept):
        return published.r_kv(c, balance=balance)

    assert_published(policy, score, model, prompts, captured, first=first, last=8)


@pytest.mark.parametrize("when", ["prompt", "every"])
def test_undefined_scores_do_not_change_the_number_of_entries(model, when):
    """R-KV has no attention to measure where all entries belong to its own queries."""
    options = {"every": 1} if when == "every" else {}
    policy = make_policy(
        {"r_kv": {"observed": 8, "entries": 8, "when": when, "protected": {"first": 0}, **options}},
        model=model,
    )
    cache = inference.prefill(model, [np.arange(9)], policy=policy, page_size=PAGE)
    assert (np.asarray(cache.layers.length) == 8).all()
