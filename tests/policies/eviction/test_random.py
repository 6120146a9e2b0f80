"""Test random eviction: the kept entries differ by seed, layer and head, and are not clustered."""

import itertools

import numpy as np
import pytest

from kvjax import inference
from kvjax.policies import make_policy
from tests.policies.captured import PAGE, captured_layers, entries


@pytest.mark.slow
def test_random_evictions_differ_by_seed_layer_and_head_and_not_by_neighbours(model, prompts):
    def kept(prompts, seed):
        policy = make_policy({"random_eviction": {"entries": 20, "seed": seed}}, model=model)
        cache = inference.prefill(model, prompts, policy=policy, page_size=PAGE, capacity=60)
        return {row: entries(cache, *row) for row in np.ndindex(3, len(prompts), 4)}

    def places(keys, layer, head):
        every = captured_layers(model, prompts[0])[layer].k[head]
        return {int(np.abs(every - key).sum(-1).argmin()) for key in keys}

    first, again, other = kept(prompts, 0), kept(prompts[:1], 0), kept(prompts, 1)
    rows = [row for row in first if row[1] == 0]
    for row in rows:
        np.testing.assert_allclose(first[row], again[row], atol=1e-5)
    stays = {(layer, head): places(first[layer, 0, head], layer, head) for layer, _, head in rows}
    assert all(a != b for a, b in itertools.combinations(stays.values(), 2))
    # the kept entries are spread, not only the first or the last
    assert all(min(own) < 20 and max(own) >= 40 for own in stays.values())
    assert all(np.abs(first[row] - other[row]).max() > 1e-3 for row in rows)
