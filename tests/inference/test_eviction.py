"""Tests of evictions during decoding: when they run, what stays, and how large the cache gets."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as caches
from kvjax import inference
from kvjax.inference import triggers
from kvjax.inference.allocation import new_cache
from kvjax.inference.footprint_log import footprint_log
from kvjax.mesh import BATCH, put, use_mesh
from kvjax.policies import make_policy
from kvjax.sampling_params import SamplingParams
from tests.policies.captured import PAGE, captured_layers, entries, pages_are_whole

NEW = 30
ENTRIES, EVERY = 24, 8


def held_by(model, prompts, policy, max_new_tokens=NEW, **options):
    """Return the answers, and the entries of a kv head before each decoded token, by sequence."""
    # one length of blocks needs few programs
    options = {"page_size": PAGE, "block": 1} | options
    sampling = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
    with footprint_log() as log:
        out = inference.generate(model, prompts, sampling, policy=policy, **options)
    return out, np.array([call.held for call in log[1:]]).T


@pytest.fixture(scope="module")
def periodic(model):
    return make_policy({"r_kv": {"entries": ENTRIES, "when": "every", "every": EVERY}}, model=model)


@pytest.fixture(scope="module")
def overflowing(model):
    return make_policy({"snapkv": {"observed": 6, "entries": ENTRIES, "when": "overflow"}}, model=model)


def test_the_budget_is_met_after_each_period(model, prompts, periodic, exact):
    """A prompt over the budget is cut at its end, a shorter one grows to the next cut."""
    out, held = held_by(model, [prompts[0], prompts[1][:10]], periodic)
    fed = np.arange(NEW - 1)
    assert held[0].tolist() == (ENTRIES + fed % EVERY).tolist()
    assert held[1].tolist() == [10 + n if n < 16 else ENTRIES + n % EVERY for n in fed]
    # the pool has room for the budget and what comes between two cuts, not for the answer
    with use_mesh(model):
        full = new_cache(model, make_policy("full").compile(model), prompts, 0, PAGE)
    assert out.stats.bytes <= caches.stats(full).bytes * 0.8


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", ["periodic", pytest.param("overflowing", marks=pytest.mark.thorough)])
def test_blocks_and_other_sequences_do_not_change_an_answer(model, prompts, schedule, request):
    policy = request.getfixturevalue(schedule)
    mixed, held = held_by(model, prompts, policy)
    twice, own = held_by(model, prompts[:1] * 2, policy, block=5)
    np.testing.assert_array_equal(mixed.tokens[0], twice.tokens[1])
    np.testing.assert_array_equal(held[0], own[1])


@pytest.mark.thorough
def test_an_overflow_takes_a_tenth_of_every_head(model, prompts, overflowing):
    _, held = held_by(model, prompts, overflowing)
    for row in held:
        for before, after in itertools.pairwise(row):
            full = before + 1
            while full > ENTRIES:
                full -= int(0.1 * full)
            assert after == full
    assert (np.diff(held) < 0).any()


@pytest.mark.thorough
def test_the_overflow_of_ragged_heads_is_their_sum(model, prompts):
    """Over an admission the window is part of the budget, and the retained entries beyond it are counted. A head cache
    with fewer entries than always stay leaves the loss to others."""
    rates = np.full((3, 4), 0.6)
    rates[:, ::2] = 0.1
    policy = make_policy(
        {
            "random": {"rates": rates, "window": 9},
            "snapkv": {"observed": 6, "entries": 20, "when": "overflow", "protected": {"first": 8}},
        },
        model=model,
    )  # fmt: skip
    _, held = held_by(model, prompts, policy)
    assert held.max() <= 20 + 1
    assert (np.diff(held) < 0).any()
    assert len(set(np.diff(held)[np.diff(held) > 0].round(6).tolist())) > 1


def test_questions_do_not_change_the_cache(model, prompts, overflowing):
    cache = inference.prefill(model, prompts, policy=overflowing, page_size=PAGE)
    before = np.asarray(cache.layers.length).copy()
    assert before.max() <= ENTRIES
    questions = [prompt[:7] for prompt in prompts]
    first, held = held_by(model, questions, overflowing, cache=cache)
    assert held.max() <= ENTRIES
    again, _ = held_by(model, questions, overflowing, cache=cache)
    np.testing.assert_array_equal(first.tokens, again.tokens)
    np.testing.assert_array_equal(cache.layers.length, before)
    pages_are_whole(cache)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("budget", "observed", "expected"),
    [
        # 31 of 62 tokens is the first half that holds what always stays
        ({"ratio": 0.5}, 31, [60, 61, 31, 32, 32, 33, 33]),
        # all 62 tokens are observing queries, and none before them scores so high
        ({"threshold": 1.0}, 62, [60, 61, 62, 63, 62, 63, 62]),
    ],
)
def test_short_prompts_are_compacted_once_they_are_long_enough(model, prompts, budget, observed, expected):
    """Nothing is evicted until the sequence is long enough, and its pool is never too small."""
    policy = make_policy(
        {"snapkv": {"observed": observed, "when": "every", "every": 2, **budget}}, model=model
    )
    _, held = held_by(model, prompts[:1], policy, max_new_tokens=8)
    assert held[0].tolist() == expected


@pytest.mark.slow
def test_every_turn_of_a_conversation_ends_within_the_budget(model, prompts, periodic):
    cache = inference.prefill(model, prompts, policy=periodic, page_size=PAGE)
    most = []
    for _ in range(3):
        questions = [prompt[:17] for prompt in prompts]
        sampling = SamplingParams(max_new_tokens=3, ignore_eos=True)
        *_, last = inference.stream(model, questions, sampling, policy=periodic, cache=cache, block=1)
        cache = last.cache
        most.append(np.asarray(cache.layers.length).max())
        pages_are_whole(cache)
    assert most == [ENTRIES + 2] * 3


def test_overflow_keeps_protected_entries(model, prompts):
    """The last entries stay, even if more would have to go at a time."""
    policy = make_policy("snapkv:observed=16,entries=40,when=overflow,drop=0.9", model=model)
    cache = inference.prefill(model, prompts, policy=policy, page_size=PAGE)
    captured = captured_layers(model, prompts[0])
    for layer, c in enumerate(captured):
        for head in range(4):
            np.testing.assert_allclose(entries(cache, layer, 0, head), c.k[head][44:], atol=1e-4)


@pytest.mark.thorough
def test_compacting_without_retained_entries_changes_nothing(model):
    """The prompt is within the window of the admission."""
    policy = make_policy("full:window=40+tova:entries=50,when=every,every=4", model=model)
    _, held = held_by(model, [np.arange(20)], policy, max_new_tokens=4)
    assert held[0].tolist() == [20, 21, 22]


@pytest.mark.thorough
def test_more_tokens_may_be_observed_than_the_page_table_holds(model, prompts):
    """A sequence is below the budget, and its page table is shorter than the observed tokens. Nothing is evicted when
    it reaches a multiple of the period."""
    policy = make_policy("snapkv:observed=80,entries=90,when=position,every=16", model=model)
    row = prompts[0][:10]
    generation = inference.generate(
        model, [row], SamplingParams(max_new_tokens=20, ignore_eos=True), policy=policy, page_size=PAGE
    )
    (answer,) = generation.tokens
    logits = inference.logits(model, [np.concatenate([row, answer[:-1]])])[0, len(row) - 1 :]
    np.testing.assert_array_equal(logits.argmax(-1), answer)
    assert (generation.stats.entries == 29).all()


def test_the_decoding_loop_compacts_running_sequences_that_are_due(model, prompts, monkeypatch):
    """It compacts running sequences whose number of tokens is a multiple of the period, and none once the pool owes
    pages."""
    monkeypatch.setattr(
        "kvjax.inference.decode.compacted",
        lambda _, __, cache, quota, **___: dataclasses.replace(
            cache, seen=jnp.where(quota.due, -1, cache.seen)
        ),
    )
    policy = make_policy(
        {"snapkv": {"observed": 6, "entries": ENTRIES, "when": "position", "every": 8}}, model=model
    )
    with use_mesh(model):
        compiled = policy.compile(model)
        cache = new_cache(model, compiled, [prompts[0]] * 4, 0, PAGE, None)
        again = triggers.recurring(compiled.host, cache)
        shared = make_policy("knorm:entries=10000000000,when=position,adakv.over=model", model=model)
        most = np.asarray(triggers.recurring(shared, cache).quota.count, np.int64)
        assert 2**31 - most[:, 0].size <= most[:, 0].sum() < 2**31  # the sum over the heads is int32
        cache = dataclasses.replace(cache, seen=put(np.array([16, 16, 15, 24], np.int32), BATCH))
        pages = dataclasses.replace(cache.pages, free_count=cache.pages.free_count * 0 - 1)
        running = put(np.array([True, False, True, True]), BATCH)
        seen = [
            again(model, compiled.decode, dataclasses.replace(cache, pages=x), running).seen.tolist()
            for x in (cache.pages, pages)
        ]
    assert seen == [[-1, 16, 15, -1], [16, 16, 15, 24]]
