"""Test that the entries that a user protects replace those that the method protects."""

import numpy as np
import pytest

from kvjax import inference
from kvjax.policies import make_policy
from tests.policies import published
from tests.policies.captured import LENGTHS, OBSERVED, PAGE, entries


@pytest.mark.parametrize(("first", "last"), [(3, 2), (0, 0)])
def test_protected_entries_stay_within_the_budget(model, prompts, captured, first, last):
    """Here these are fewer of the last tokens than the method's observation window, or none."""
    policy = make_policy(
        {"snapkv": {"entries": 20, "observed": OBSERVED, "protected": {"first": first, "last": last}}},
        model=model,
    )
    cache = inference.prefill(model, prompts, policy=policy, page_size=PAGE)
    for b, layers in enumerate(captured):
        place = np.arange(LENGTHS[b])
        protected = (place < first) | (place >= LENGTHS[b] - last)
        for layer, c in enumerate(layers):
            scores = np.where(protected, np.inf, published.snapkv(c, OBSERVED))
            for head, mask in enumerate(published.best(scores, 20)):
                np.testing.assert_allclose(entries(cache, layer, b, head), c.k[head][mask], atol=1e-4)
