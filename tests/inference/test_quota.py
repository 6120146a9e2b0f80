"""Tests of how many entries a compaction leaves in each head cache, where a budget and the entries that always stay
collide."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from kvjax import inference
from kvjax.errors import UserError
from kvjax.inference import triggers
from kvjax.mesh import use_mesh
from kvjax.policies import make_policy
from kvjax.policies.registry import WRAPPERS
from tests.policies import published
from tests.policies.captured import LENGTHS, PAGE, captured_layers, entries, pages_are_whole


def test_the_window_of_an_admission_is_part_of_the_budget(model, prompts):
    """The window stays in any case. A number of entries that cannot hold it is refused, and a context that is too short
    for a ratio keeps nothing but the window."""
    given = {"full": {"window": 21}}
    with pytest.raises(UserError, match="the budget of 18 entries per kv head is below the 20 that always"):
        inference.prefill(
            model, prompts, policy=make_policy(given | {"knorm": {"entries": 18}}), page_size=PAGE
        )
    cache = inference.prefill(
        model, prompts, policy=make_policy(given | {"knorm": {"ratio": 0.45}}), page_size=PAGE
    )
    for b, stay in enumerate((int(0.45 * 60) - 20, 0)):
        assert (np.asarray(cache.layers.length)[:, b] == stay).all()
    np.testing.assert_array_equal(cache.seen, LENGTHS)


def test_dropped_tokens_do_not_count_in_the_window(model, prompts, monkeypatch):
    """After 10 of 25 tokens were dropped, the window of 20 has 15, and 9 of 24 entries remain for older ones."""
    policy, counts = make_policy("full:window=21+knorm:entries=24,when=every,every=8", model=model), []

    def compact_to(model, policy, cache, quota):
        counts.append(np.asarray(quota.count))
        return cache

    monkeypatch.setattr(triggers, "compact_to", compact_to)
    cache = inference.prefill(model, [prompts[0][:25]], policy=policy, page_size=PAGE)
    counts.clear()
    with use_mesh(model):
        dropped = dataclasses.replace(cache, origin=cache.origin + 10)
        triggers.evict_to_budget(model, policy.compile(model), dropped, np.array([True]))
    np.testing.assert_array_equal(counts[0], 9)


@pytest.mark.parametrize(
    "name",
    [
        "snapkv",
        "expected_attention",
        *(pytest.param(x, marks=pytest.mark.thorough) for x in ("adakv", "pyramidkv", "critical_kv", "r_kv")),
    ],
)
@pytest.mark.parametrize(
    ("budget", "kept"), [({"ratio": 0.5}, [30, 10, 6, 4]), ({"entries": 30}, [30, 20, 6, 4])]
)
def test_short_contexts_are_not_compacted_in_a_batch_with_a_long_one(
    model, prompts, captured, name, budget, kept
):
    """Short contexts have no more tokens than are observed or always stay. A longer one whose budget is below that
    keeps its newest tokens, and the long one keeps what it keeps alone."""
    if name == "expected_attention" and "ratio" in budget:
        kept = [30, 10, 3, 4]  # it needs only the first 4
    given: dict[str, Any] = dict(budget)
    if name == "snapkv":
        given["observed"] = 12
    elif name in WRAPPERS:
        given |= {"observed": 12, name: {}}
    policy = make_policy({"snapkv" if name in WRAPPERS else name: given}, model=model)
    rows = [prompts[0], *(prompts[0][:count] for count in (20, 6, 4))]
    cache = inference.prefill(model, rows, policy=policy, page_size=PAGE)
    pages_are_whole(cache)
    length = np.asarray(cache.layers.length)
    alone = inference.prefill(model, rows[:1] * 4, policy=policy, page_size=PAGE)
    np.testing.assert_array_equal(length[:, 0], np.asarray(alone.layers.length)[:, 3])
    for layer, head in np.ndindex(3, 4):
        np.testing.assert_allclose(entries(cache, layer, 0, head), entries(alone, layer, 3, head), atol=1e-5)
        for b, (row, count) in list(enumerate(zip(rows, kept, strict=True)))[1:]:
            keys = captured[0][layer].k[head][: row.size]
            if name == "expected_attention":
                # only its first 4 entries are sure to stay
                np.testing.assert_allclose(
                    entries(cache, layer, b, head)[: min(4, count)], keys[: min(4, count)], atol=1e-4
                )
                assert length[layer, b, head] == count
            elif name != "r_kv" or count <= 8:
                np.testing.assert_allclose(
                    entries(cache, layer, b, head), keys[row.size - count :], atol=1e-4
                )


@pytest.mark.parametrize(
    "name",
    [
        "r_kv",
        *(pytest.param(x, marks=pytest.mark.thorough) for x in ("snapkv", "adakv", "expected_attention")),
    ],
)
@pytest.mark.parametrize("budget", [{"ratio": 0.4}, {"entries": 1024}])
def test_short_prompts_are_not_compacted(model, prompts, captured, name, budget):
    """SnapKV observes 64 queries and R-KV 8, and no prompt has so many."""
    given = {"snapkv": budget | {"adakv": {}}} if name == "adakv" else {name: budget}
    policy, rows = make_policy(given, model=model), [prompts[0][:5], prompts[0][:3]]
    cache = inference.prefill(model, rows, policy=policy, page_size=PAGE)
    pages_are_whole(cache)
    kept = (2, 3) if name == "expected_attention" and "ratio" in budget else (5, 3)
    for layer, b, head in np.ndindex(3, 2, 4):
        keys = captured[0][layer].k[head, : len(rows[b])]
        # Expected Attention keeps its first 4, and needs no more
        newest = keys[: kept[b]] if name == "expected_attention" else keys[len(keys) - kept[b] :]
        np.testing.assert_allclose(entries(cache, layer, b, head), newest, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("snapkv", {"observed": 6, "entries": 4}, 4),
        ("r_kv", {"sink": 4, "entries": 6}, 6),
        ("r_kv", {"sink": 4, "ratio": 0.1}, 6),
    ],
)
def test_a_budget_below_the_protected_entries_keeps_the_newest(model, prompts, captured, name, given, kept):
    policy = make_policy({name: given}, model=model)
    cache = inference.prefill(model, prompts[:1] * 2, policy=policy, page_size=PAGE)
    for layer, b, head in np.ndindex(3, 2, 4):
        keys = captured[0][layer].k[head]
        np.testing.assert_allclose(entries(cache, layer, b, head), keys[len(keys) - kept :], atol=1e-4)


@pytest.mark.parametrize("over", ["head", "layer"])
def test_a_threshold_keeps_the_entries_that_score_above_it(model, prompts, over):
    """Any number of entries may stay, and heads do not compete."""
    captured = [captured_layers(model, prompt) for prompt in prompts]
    limit = float(np.median(np.concatenate([published.knorm(c).ravel() for c in captured[0]])))
    policy = make_policy({"knorm": {"threshold": limit, "adakv": {"pinned": 0.0, "over": over}}}, model=model)
    cache = inference.prefill(model, prompts, policy=policy, page_size=PAGE)
    pages_are_whole(cache)
    for b, layers in enumerate(captured):
        for layer, c in enumerate(layers):
            want = (published.knorm(c) >= limit).sum(-1)
            assert want.min() < want.max()
            np.testing.assert_array_equal(cache.layers.length[layer, b], want)
