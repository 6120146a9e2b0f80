"""Tests of evictions on top of an admission: entries beyond the window are scored and evicted, and head caches have
unequal lengths."""

import numpy as np
import pytest

from kvjax import inference
from kvjax.cache import CapacityError
from kvjax.policies import make_policy
from kvjax.sampling_params import SamplingParams
from tests.policies import published
from tests.policies.captured import (
    OBSERVED,
    PAGE,
    WINDOW,
    captured_layers,
    entries,
    pages_are_whole,
    scored,
)
from tests.tiny_models import tiny_gates

KEPT = 18


@pytest.fixture(scope="module")
def gated(model):
    return {"wgkv": {"gates": tiny_gates(model), "tau": 0.5, "window": WINDOW}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "pooling", "over"),
    [("max", "max", "head"), pytest.param("mean", "average", "layer", marks=pytest.mark.thorough)],
)
def test_scores_and_kept_entries_match_the_published_method(model, prompts, admitted, group, pooling, over):
    """This is tested in the first layer, whose queries do not depend on refused tokens."""
    how = {"group": group, "pooling": pooling}
    shared = {"entries": KEPT, "adakv": {"over": over, "pinned": 0.0}}
    policy = make_policy(admitted | {"snapkv": {"observed": OBSERVED} | how | shared}, model=model)
    scores = scored(model, policy, prompts)
    before = inference.prefill(model, prompts, policy=make_policy(admitted, model=model), page_size=PAGE)
    after = inference.prefill(model, prompts, policy=policy, page_size=PAGE)
    pages_are_whole(after)
    for b, prompt in enumerate(prompts):
        q = captured_layers(model, prompt)[0].q.reshape(4, 2, -1, 8)[:, :, -OBSERVED:]
        stored = [entries(before, 0, b, head) for head in range(4)]
        want = [published.snapkv_of_stored(q[head], keys, **how) for head, keys in enumerate(stored)]
        for head, own in enumerate(want):
            np.testing.assert_allclose(scores[0, b, head, -len(own) :], own, atol=1e-6)
        # the window's other tokens count towards the budget
        count = KEPT - WINDOW + 1
        if over == "layer":
            stays = np.split(
                published.best(np.concatenate(want)[None], 4 * count)[0], np.cumsum([*map(len, want)])[:3]
            )
        else:
            stays = [published.best(own[None], min(count, len(own)))[0] for own in want]
        for head, keys in enumerate(stored):
            np.testing.assert_allclose(entries(after, 0, b, head), keys[stays[head]], atol=1e-5)
        assert (max(mask.sum() for mask in stays) > count) == (over == "layer")


@pytest.mark.thorough
def test_observed_queries_are_causal_over_stored_entries(model, prompts, admitted):
    """WG-KV itself uses 256 of each. The comparison is with a softmax whose causal mask is written out by true
    positions. The oldest query's own key is stored, and no entry can be newer."""
    ((name, options),) = admitted.items()
    wider = {name: options | {"window": OBSERVED}}
    policy = make_policy(wider | {"snapkv": {"entries": KEPT, "observed": OBSERVED}}, model=model)
    scores = scored(model, policy, prompts)
    before = inference.prefill(model, prompts, policy=make_policy(wider, model=model), page_size=PAGE)
    newest = []
    for b, prompt in enumerate(prompts):
        c = captured_layers(model, prompt)[0]
        asked = np.arange(len(prompt))[-OBSERVED:]
        for head in range(4):
            keys = entries(before, 0, b, head)
            position = np.abs(c.k[head] - keys[:, None]).sum(-1).argmin(-1)
            q = c.q.reshape(4, 2, -1, 8)[head, :, asked]
            logits = np.where(position <= asked[:, None, None], q @ keys.T / np.sqrt(8), -np.inf)
            mass = np.pad(published.softmax(logits).mean((0, 1)), 2)
            want = np.lib.stride_tricks.sliding_window_view(mass, 5).mean(-1)
            np.testing.assert_allclose(scores[0, b, head, -len(want) :], want, atol=1e-6)
            newest.append(int(position.max()) - int(asked.min()))
    assert max(newest) == 0


@pytest.mark.thorough
def test_gates_eviction_and_selection_combine(model, prompts, gated):
    """A selection that reads every page gives the answers of no selection, and one that reads few pages does not."""
    gates_and_eviction = gated | {"snapkv": {"observed": OBSERVED, "entries": KEPT}}
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
    options = {"page_size": PAGE, "capacity": 100}
    answers = [
        inference.generate(model, prompts, sampling, policy=policy, **options).tokens
        for policy in (
            make_policy(gates_and_eviction, model=model),
            make_policy(gates_and_eviction | {"quest": {"tokens": 1000}}, model=model),
            make_policy(gates_and_eviction | {"quest": {"tokens": 1}}, model=model),
        )
    ]
    np.testing.assert_array_equal(answers[0], answers[1])
    assert (np.array(answers[0]) != np.array(answers[2])).any()


@pytest.mark.thorough
def test_evicted_entries_free_pages_for_admitted_ones(model, prompts, gated):
    """A pool that is too small for an answer is large enough if the overflow is evicted."""
    sampling = SamplingParams(max_new_tokens=120, ignore_eos=True)
    options = {"page_size": PAGE, "capacity": 60, "block": 1}
    with pytest.raises(CapacityError):
        inference.generate(model, prompts, sampling, policy=make_policy(gated, model=model), **options)
    evicting = {"observed": OBSERVED, "entries": 24, "when": "overflow"}
    bounded = make_policy(gated | {"snapkv": evicting}, model=model)
    *_, last = inference.stream(model, prompts, sampling, policy=bounded, **options)
    cache = last.cache
    pages_are_whole(cache)
    assert np.asarray(cache.seen).min() >= 120 + min(map(len, prompts)) - 1
    assert np.asarray(cache.layers.length).mean() <= 24 - WINDOW + 2
