"""Tests of the KV footprint against the paper's worked numbers and a cache simulated token by token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax import inference
from kvjax.errors import UserError
from kvjax.evaluate.footprint import Occupancy, critical_footprint, occupancy
from kvjax.inference.footprint_log import Call, footprint_log
from kvjax.policies import make_policy
from kvjax.sampling_params import SamplingParams
from tests.evaluate.planned_heads import evicting_head, final, mean_head, streaming_head
from tests.policies.captured import unnormed

LONG = 131072, 128


def sparse(share, chunk, kept=1.0):
    return mean_head(
        [
            (share, streaming_head(*LONG, chunk, sink=128, window=1024)),
            (1 - share, evicting_head(*LONG, chunk, share=kept)),
        ]
    ).footprint


def test_the_papers_small_example():
    """The example has 8 prompt and 2 new tokens, chunks of 4, one sink and a window of 2."""
    local, full = streaming_head(8, 2, 4, sink=1, window=2), evicting_head(8, 2, 4)
    assert local.total == 40
    assert (local.held + local.tokens).tolist() == [4, 7, 4, 4]
    assert full.total == 55
    assert mean_head([(0.5, local), (0.5, full)]).footprint == pytest.approx(0.8636, abs=5e-5)


def test_the_papers_figure_1():
    """The fraction is that of Figure 1, where full attention holds 36 entries."""
    held = np.array([0, 1, 2, 2, 2, 3, 4, 4.0])
    assert Occupancy(held, np.ones(8, int)).footprint == pytest.approx(26 / 36)


@pytest.mark.parametrize(
    ("share", "chunk", "kept", "footprint"),
    [
        (0.7, 32768, 1.0, 0.4839),
        (1.0, 32768, 1.0, 0.2627),
        (0.7, 8192, 1.0, 0.3552),
        (0.0, 32768, 0.3, 0.4761),
        (0.0, 131072, 0.3, 0.9986),
    ],
)
def test_the_papers_long_examples(share, chunk, kept, footprint):
    assert sparse(share, chunk, kept) == pytest.approx(footprint, abs=5e-5)


sizes = st.tuples(st.integers(1, 60), st.integers(0, 8), st.integers(1, 20))


@given(sizes=sizes, sink=st.integers(0, 4), window=st.integers(1, 9))
def test_streaming_heads_equal_a_simulated_cache(sizes, sink, window):
    prompt, output, chunk = sizes
    stored, total, peak, seen = [], 0, 0, 0
    steps = [min(chunk, prompt - at) for at in range(0, prompt, chunk)] + [1] * output
    for count in steps:
        for _ in range(count):
            stored.append(seen)
            seen += 1
            total += len(stored)
        peak, last = max(peak, len(stored)), len(stored)
        stored = [j for j in stored if j < min(sink, seen - min(seen, window)) or j >= seen - window]
    found = streaming_head(prompt, output, chunk, sink=sink, window=window)
    assert found.total == total
    assert found.peak == pytest.approx(peak / seen)
    assert final(found) == pytest.approx(last / seen)


@given(sizes=sizes, kept=st.floats(0, 1), less=st.floats(0, 1))
def test_the_footprint_falls_with_the_share_kept(sizes, kept, less):
    assert evicting_head(*sizes).footprint == pytest.approx(1)
    assert evicting_head(*sizes).peak == 1
    some = evicting_head(*sizes, share=kept, observed=0)
    assert evicting_head(*sizes, share=kept * less, observed=0).footprint <= some.footprint + 1e-12


def test_the_critical_footprint_of_a_sweep():
    sweep = [(0.8, 0.95), (0.2, 0.3), (0.5, 0.6)]
    found = critical_footprint(sweep, 1.0)
    assert (found.relation, found.footprint) == ("=", pytest.approx(0.5 + 0.3 * 0.3 / 0.35))
    assert str(critical_footprint(sweep, 0.2)) == "<20%"
    assert str(critical_footprint(sweep, 2.0)) == ">80%"


def test_a_real_cache_equals_planned_streaming_heads():
    """The streaming heads of the small example run with a shorter sequence, which stops when the longer one does."""
    model = unnormed()
    policy = make_policy("streaming_llm:sink=1,window=3", model=model)
    prompts = [np.arange(8), np.arange(6)]
    with footprint_log() as log:
        inference.generate(
            model, prompts, SamplingParams(max_new_tokens=3, ignore_eos=True), policy=policy, chunk=4, block=1
        )
    for sequence, length in enumerate((8, 6)):
        found, planned = occupancy(log, sequence), streaming_head(length, 2, 4, sink=1, window=2)
        np.testing.assert_allclose(found.held, planned.held)
        np.testing.assert_array_equal(found.tokens, planned.tokens)
        assert final(found) == final(planned) < found.peak
    assert occupancy(log, 0).total == 40


def check_plan(policy, planned):
    """Assert that a real cache holds what is planned for 8 prompt and 2 new tokens in chunks of 4."""
    model = unnormed()
    sampling = SamplingParams(max_new_tokens=3, ignore_eos=True)
    with footprint_log() as log:
        inference.generate(model, [np.arange(8)], sampling, policy=policy(model), chunk=4, block=1)
    found = occupancy(log, 0)
    np.testing.assert_allclose(found.held, planned.held)
    for measure in (lambda head: head.footprint, lambda head: head.peak, final):
        assert measure(found) == pytest.approx(measure(planned))


@pytest.mark.slow
def test_a_real_cache_with_two_kinds_of_heads_equals_the_plan():
    heads = np.tile([0.0, 1.0, 1.0, 0.0], (3, 1))
    planned = mean_head([(0.5, streaming_head(8, 2, 4, sink=1, window=2)), (0.5, evicting_head(8, 2, 4))])
    assert planned.footprint == pytest.approx(0.8636, abs=5e-5)
    check_plan(
        lambda model: make_policy({"head_pattern": {"sink": 1, "window": 3}}, model=model, gates=heads),
        planned,
    )


@pytest.mark.slow
def test_a_real_cache_with_chunked_eviction_equals_the_plan():
    planned = evicting_head(8, 2, 4, share=0.5, observed=0)
    check_plan(lambda model: make_policy("knorm:ratio=0.5,when=chunk,chunk=4", model=model), planned)


@pytest.mark.slow
def test_a_patch_counts_only_in_the_held_footprint():
    model = unnormed()
    policy = make_policy("snapkv:ratio=0.5,when=chunk,observers=prompt,chunk=8,observed=4", model=model)
    with footprint_log() as log:
        cache = inference.prefill(model, [np.arange(20)], policy=policy)
    with footprint_log(log) as asked:
        inference.generate(
            model, [[3, 4]], SamplingParams(max_new_tokens=2, ignore_eos=True), policy=policy, cache=cache
        )
    assert len(log) == 5
    found = occupancy(asked, 0)
    # the chunks have 8, 8 and 4 tokens, and the first two are followed by a patch of 4; half of each whole chunk stays,
    # and the window of the last
    assert found.tokens.tolist() == [8, 4, 8, 4, 4, 2, 1]
    assert found.held.tolist() == [0, 8, 4, 12, 8, 12, 14]
    assert found.temporary is not None
    assert found.temporary.tolist() == [False, True, False, True, False, False, False]
    assert found.length == 23
    assert found.peak == 16 / 23
    # these are the sums of each call's steps: 1 … 8, 5 … 12, 9 … 12, 13 and 14, 15; the patches have 9 … 12 and 13 … 16
    own, patches = 36 + 68 + 42 + 27 + 15, 42 + 58
    assert found.total == own
    assert found.footprint == pytest.approx(own / (23 * 24 / 2))
    assert found.footprint_held == pytest.approx((own + patches) / (23 * 24 / 2))


def test_calls_are_temporary_if_later_calls_replace_them():
    """In the first sequence, two calls after a prompt of 8 tokens observe it, and later calls take their places."""
    log = [
        Call(np.zeros(2), np.array(seen), np.array(tokens))
        for seen, tokens in (
            ([0, 0], [8, 6]),
            ([8, 6], [4, 2]),
            ([12, 6], [1, 0]),
            ([8, 6], [3, 0]),
            ([8, 6], [2, 1]),
        )
    ]
    first, second = occupancy(log, 0), occupancy(log, 1)
    assert first.temporary is not None
    assert second.temporary is not None
    assert first.temporary.tolist() == [False, True, True, True, False]
    assert second.temporary.tolist() == [False, True, False]
    assert (first.length, second.length) == (10, 7)


def test_a_log_needs_the_whole_context_of_one_batch():
    model = unnormed()
    cache = inference.prefill(model, [np.arange(8)])
    with footprint_log() as log:
        inference.generate(model, [[3, 4]], SamplingParams(max_new_tokens=1), cache=cache)
        with pytest.raises(UserError, match="this footprint log begins after 8 tokens: log the context too"):
            occupancy(log, 0)
        with pytest.raises(
            UserError, match="a footprint log is for one batch of sequences: open another one"
        ):
            inference.prefill(model, [np.arange(8)])
    inference.prefill(model, [np.arange(8)])
    assert len(log) == 1


def test_a_half_is_rounded_to_even():
    assert evicting_head(12, 0, 5, share=0.5, observed=0).held.tolist() == [0, 2, 4]


def test_a_share_of_a_chunk_is_rounded_to_the_nearest():
    assert evicting_head(30, 0, 10, share=0.33, observed=0).held.tolist() == [0, 3, 6]


def test_a_score_equal_to_the_target_meets_it():
    found = critical_footprint([(0.2, 0.5), (0.5, 0.9), (0.8, 0.95)], 1.0)
    assert (found.relation, found.footprint) == ("=", 0.5)
    assert str(critical_footprint([(0.2, 0.9)], 1.0)) == "<20%"
