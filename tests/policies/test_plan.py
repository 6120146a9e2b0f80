"""What a plan refuses, and the most that it expects to be held."""

import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.inference import sampling
from kvjax.policies import make_policy
from tests.policies.captured import OBSERVED

CHUNK = 20


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"ratio": 0.25},
            "the budget of 5 of a chunk's 20 entries per kv head is below the 6 that always stay",
        ),
        (
            {"name": "knorm", "admission": "streaming_llm", "window": 9},
            "streaming_llm+knorm: a budget of each chunk counts its tokens, which an admission does not all store: "
            "state entries or size",
        ),
        (
            {"admission": "streaming_llm", "window": 9, "when": "chunk", "observers": "prompt"},
            "streaming_llm+snapkv: observers='prompt' reads tokens behind a chunk, which would push its own out of an "
            "admission's ring",
        ),
        (
            {"when": "sometimes"},
            "eviction: when is one of prompt, chunk, every, overflow, got 'sometimes'",
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
def test_bad_schedules_are_one_line(model, options, says):
    options = {"name": "snapkv", "ratio": 0.3, "when": "chunk", "chunk": CHUNK} | options
    if options["name"] == "snapkv":
        options["observed"] = OBSERVED
    with pytest.raises(UserError) as error:
        make_policy(options.pop("name"), model=model, **options)
    assert str(error.value) == says


def test_a_pool_has_room_for_a_patch(model):
    """50 chunks of 8 of which 4 stay, and one that may be rounded up, the chunk that is read, and 4 that look at it."""
    policy = make_policy(
        "snapkv", model=model, ratio=0.5, observed=4, when="chunk", observers="prompt", chunk=8
    )
    assert policy.expected_entries(400, 1).max() == 50 * 5 + 8 + 4
    sampling.prefill(model, [np.arange(400) % 61], policy=policy, page_size=1, chunk=8)


@pytest.mark.parametrize("when", ["every", "overflow"])
def test_a_budget_below_what_stays_is_refused_before_anything_is_read(model, when):
    """Also where the prompt alone would fit."""
    options = {"every": 8} if when == "every" else {}
    policy = make_policy("snapkv", model=model, observed=6, entries=5, when=when, **options)
    with pytest.raises(
        UserError, match="the budget of 5 entries per kv head is below the 6 that always stay"
    ):
        sampling.prefill(model, [np.arange(4)], policy=policy)
