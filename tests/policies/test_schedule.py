"""Test the errors of a schedule, and the largest number of entries that it expects to hold."""

import numpy as np
import pytest

from kvjax import inference
from kvjax.errors import UserError
from kvjax.policies import Entries, Ratio, Schedule, Trigger, make_policy
from kvjax.policies.budget import Shares
from kvjax.policies.schedule import Needs, Range, Undecided
from tests.policies.captured import OBSERVED

CHUNK = 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"ratio": 0.25},
            "the budget of 5 of a chunk's 20 entries per kv head is below the 6 that always stay",
        ),
        (
            {"name": "knorm", "admission": {"streaming_llm": {"window": 9}}},
            "streaming_llm+knorm: this budget is a share of each chunk's tokens, and an admission does not store them "
            "all: give entries or size",
        ),
        (
            {"admission": {"streaming_llm": {"window": 9}}, "when": "chunk", "observers": "prompt"},
            "streaming_llm+snapkv: observers='prompt' reads tokens after a chunk, which would push the chunk's own "
            "tokens out of the admission's window",
        ),
        (
            {"when": "sometimes"},
            "eviction: when is one of prompt, chunk, every, position, overflow, got 'sometimes'",
        ),
        ({"when": "prompt", "chunk": 9}, "chunk=9 needs when='chunk'"),
        ({"when": "prompt", "chunk": 0, "observers": "prompt"}, "observers='prompt' needs when='chunk'"),
        ({"when": "chunk", "observers": "end"}, "eviction: observers is one of own, prompt, got 'end'"),
        ({"chunk": 6}, "when='chunk' needs a chunk of more than 6 tokens, got 6"),
        (
            {"name": "knorm", "when": "chunk", "observers": "prompt"},
            "observers='prompt' is for methods that look back at the last tokens",
        ),
    ],
)
def test_invalid_schedules_give_one_line_errors(model, options, message):
    options = {"name": "snapkv", "ratio": 0.3, "when": "chunk", "chunk": CHUNK} | options
    if options["name"] == "snapkv":
        options["observed"] = OBSERVED
    policy = options.pop("admission", {}) | {options.pop("name"): options}
    with pytest.raises(UserError) as error:
        make_policy(policy, model=model)
    assert str(error.value) == message


@pytest.mark.thorough
def test_the_pool_holds_the_observing_tokens_of_a_chunk(model):
    """The bound counts 50 chunks with 4 of 8 entries and one more for rounding each, the chunk that is read, and 4
    observing tokens."""
    policy = make_policy("snapkv:ratio=0.5,observed=4,when=chunk,observers=prompt,chunk=8", model=model)
    assert policy.expected_entries(400, 1).max() == 50 * 5 + 8 + 4
    inference.prefill(model, [np.arange(400) % 61], policy=policy, page_size=1, chunk=8)


@pytest.mark.parametrize("when", ["every", "overflow"])
def test_a_budget_below_the_protected_entries_is_refused_before_prefill(model, when):
    """The budget is refused even if the prompt alone would fit."""
    options = {"every": 8} if when == "every" else {}
    policy = make_policy({"snapkv": {"observed": 6, "entries": 5, "when": when, **options}}, model=model)
    with pytest.raises(
        UserError, match="the budget of 5 entries per kv head is below the 6 that always stay"
    ):
        inference.prefill(model, [np.arange(4)], policy=policy)


def ranges(schedule, tokens, chunk):
    """Return the range of tokens of each compaction of a prompt."""
    ends = [min(start + chunk, tokens) for start in range(0, tokens, chunk)]
    before = [0, *ends[:-1]]
    return [schedule.range(tokens, old, end, 1) for old, end in zip(before, ends, strict=True)]


def test_ranges_match_a_worked_example():
    """For Fast KVzip with 100,000 tokens at 0.3 and a window of 4,096, r' = .27010, and in all 30,000 entries per kv
    head stay."""
    needs = Needs(undecided=Undecided(4096, 16_000, 0.02))
    schedule = Schedule(Ratio(0.3), Trigger("chunk", chunk=16_000), needs, Shares(over="model"))
    found = ranges(schedule, 100_000, 16_000)
    assert found[0] == Range(16_000 - 4096, pytest.approx(0.27010, abs=5e-6), 4096)
    assert [x.tokens for x in found] == [11_904, *[16_000] * 5, 4000]
    assert 4096 + sum(x.ratio * x.tokens for x in found) == pytest.approx(30_000)


def test_ranges_follow_the_prefix_which_is_not_counted():
    schedule = Schedule(Ratio(0.5), Trigger(), Needs(undecided=Undecided(10)), Shares(over="model"))
    assert schedule.range(107, 0, 107, 1, prefix=7) == Range(90, pytest.approx(40 / 90), 10)


@pytest.mark.parametrize(
    ("ratio", "tokens", "newest"), [(0.25, 16, 4), (0.29, 100, 29), (0.01, 50, 0), (0.3, 100, 30)]
)
def test_a_window_that_fills_the_budget_leaves_no_other_entries(ratio, tokens, newest):
    schedule = Schedule(Ratio(ratio), Trigger(), Needs(undecided=Undecided(31)), Shares(over="model"))
    assert schedule.range(tokens, 0, tokens, 1) == Range(tokens - newest, 0.0, newest)


def test_a_short_prompts_window_is_a_share_of_it():
    schedule = Schedule(
        Ratio(0.5), Trigger(), Needs(undecided=Undecided(4096, 16_000, 0.02)), Shares(over="model")
    )
    assert schedule.range(15_999, 0, 15_999, 1).undecided == 319
    assert schedule.range(16_000, 0, 16_000, 1).undecided == 4096


def test_a_budget_in_entries_is_divided_among_ranges():
    schedule = Schedule(
        Entries(40), Trigger("chunk", chunk=32), Needs(undecided=Undecided(10)), Shares(over="model")
    )
    found = ranges(schedule, 100, 32)
    assert 10 + sum(x.ratio * x.tokens for x in found) == pytest.approx(40)
    assert schedule.range(39, 0, 39, 1).ratio == 1.0, "a context within the budget is kept whole"


def test_ranges_bound_the_peak_by_budget_and_chunk():
    needs = Needs(undecided=Undecided(4096, 16_000, 0.02), prefix=30)
    schedule = Schedule(Ratio(0.3), Trigger("chunk", chunk=16_000), needs, Shares(over="head"))
    assert schedule.peak_entries(100_000, 1) == 0.3 * 100_000 + 30 + 16_000
