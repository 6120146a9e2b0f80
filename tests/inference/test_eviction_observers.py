"""Tests of observer tokens: the formulas choose entries with their queries, and the observers are not stored."""

from typing import Any

import numpy as np
import pytest

from kvjax import inference
from kvjax.errors import UserError
from kvjax.policies import (
    TOVA,
    Adaptive,
    Entries,
    KeyDiff,
    KNorm,
    Policy,
    Quest,
    Ratio,
    Schedule,
    StreamingLLM,
    Trigger,
    make_policy,
)
from tests.policies import published
from tests.policies.captured import (
    LENGTHS,
    OBSERVED,
    PAGE,
    WINDOW,
    captured_layers,
    entries,
    pages_are_whole,
)

KEPT = 18


def test_observers_choose_entries_and_are_dropped(model, prompts, captured):
    """The last tokens of each prompt are read as observers behind the others. The formula's choice for the whole prompt
    stays, without the observers, and the cache ends before them."""
    policy, behind = make_policy({"snapkv": {"entries": 20, "observed": OBSERVED}}, model=model), 2
    rows, observers = [prompt[:-behind] for prompt in prompts], [prompt[-behind:] for prompt in prompts]
    cache = inference.prefill(model, rows, policy=policy, observers=observers, page_size=PAGE)
    pages_are_whole(cache)
    np.testing.assert_array_equal(cache.seen, [len(row) for row in rows])
    for b, layers in enumerate(captured):
        place = np.arange(LENGTHS[b])
        for layer, c in enumerate(layers):
            scores = np.where(place >= LENGTHS[b] - OBSERVED, np.inf, published.snapkv(c, OBSERVED))
            for head, mask in enumerate(published.best(scores[:, :-behind], 20)):
                own = entries(cache, layer, b, head)
                np.testing.assert_allclose(own, c.k[head, :-behind][mask], atol=1e-4)
    with pytest.raises(UserError, match="observers are one row a prompt, got 1 for 2"):
        inference.prefill(model, rows, policy=policy, observers=observers[:1])
    busy = make_policy(
        {"snapkv": {"entries": 20, "observed": OBSERVED, "when": "every", "every": 4}}, model=model
    )
    with pytest.raises(UserError, match="observers look at a prompt's end, and snapkv compacts while it"):
        inference.prefill(model, rows, policy=busy, observers=observers)


def test_guidance_observes_every_prompt_and_every_chunk(model, prompts):
    """The policy's own tokens are read where given ones would be. A chunk of a longer prompt keeps by itself what it
    keeps as a prompt."""
    tokens = (3, 9, 27, 20, 7, 11, 50, 2)
    rule: dict[str, Any] = {"ratio": 0.4, "observed": OBSERVED}
    given = inference.prefill(
        model,
        prompts,
        policy=make_policy({"snapkv": rule}, model=model),
        observers=[list(tokens)] * 2,
        page_size=PAGE,
    )
    own = inference.prefill(
        model,
        prompts,
        policy=make_policy({"snapkv": {"observers": tokens, **rule}}, model=model),
        page_size=PAGE,
    )
    pages_are_whole(own)
    parts = make_policy(
        {"snapkv": {"when": "chunk", "chunk": 16, "observers": list(tokens), **rule}}, model=model
    )
    long = inference.prefill(model, prompts, policy=parts, page_size=PAGE)
    pages_are_whole(long)
    first = inference.prefill(
        model, [row[:16] for row in prompts],
        policy=make_policy({"snapkv": {"observers": tokens, **rule}}, model=model), page_size=PAGE,
    )  # fmt: skip
    np.testing.assert_array_equal(own.seen, LENGTHS)
    np.testing.assert_array_equal(long.seen, LENGTHS)
    for row in np.ndindex(3, 2, 4):
        np.testing.assert_array_equal(entries(own, *row), entries(given, *row))
        begin = entries(first, *row)
        assert len(begin) == 6
        np.testing.assert_allclose(entries(long, *row)[:6], begin, atol=1e-5)


@pytest.mark.thorough
def test_observers_do_not_enter_the_local_window(model, prompts, admitted):
    """The observers' queries are the newest of the observation. The local window and the retained entries are those of
    the prompt alone."""
    rows, observers = [prompt[:-2] for prompt in prompts], [prompt[-2:] for prompt in prompts]
    policy = make_policy(admitted | {"snapkv": {"entries": KEPT, "observed": OBSERVED}}, model=model)
    before = inference.prefill(model, rows, policy=make_policy(admitted, model=model), page_size=PAGE)
    after = inference.prefill(model, rows, policy=policy, observers=observers, page_size=PAGE)
    pages_are_whole(after)
    np.testing.assert_array_equal(after.seen, [len(row) for row in rows])
    for b, prompt in enumerate(prompts):
        c = captured_layers(model, prompt)[0]
        for head in range(4):
            keys = entries(before, 0, b, head)
            score = published.snapkv_of_stored(c.q[2 * head : 2 * head + 2, -OBSERVED:], keys)
            stays = published.best(score, min(KEPT - WINDOW + 1, len(keys)))
            np.testing.assert_allclose(entries(after, 0, b, head), keys[stays], atol=1e-5)
            near = np.asarray(after.pages.pool)[np.asarray(after.layers.page_table)[0, b, head, :2]]
            ring = near.reshape(-1, 16)[: WINDOW - 1, :8]
            last = c.k[head, len(prompt) - 2 - (WINDOW - 1) : len(prompt) - 2]
            order = np.argsort(np.arange(len(last)) + len(prompt) - 2 - len(last) & 7)
            np.testing.assert_allclose(ring, last[order], atol=1e-4)


def test_observers_are_not_stored_by_an_admission_without_a_window(model, prompts):
    """The admission may refuse the observers, and nothing of the prompt is evicted in their place."""
    parts = {"admission": StreamingLLM(sink=20), "window": 1, "eviction": TOVA()}
    schedules = Schedule(Entries(40)), Schedule(Entries(40), Trigger(observers=(1, 2, 3)))
    alone, observed = (
        inference.prefill(model, prompts, policy=Policy(**parts, schedule=schedule), page_size=PAGE)
        for schedule in schedules
    )
    np.testing.assert_array_equal(observed.layers.length, 20)
    np.testing.assert_array_equal(observed.seen, alone.seen)
    for row in np.ndindex(3, 2, 4):
        np.testing.assert_array_equal(entries(observed, *row), entries(alone, *row))


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (Policy(), "full evicts nothing"),
        (Policy(StreamingLLM(), window=4), "streaming_llm evicts nothing"),
        (Policy(selection=Quest(tokens=8)), "quest evicts nothing"),
        (Policy(eviction=KNorm(), schedule=Schedule(Ratio(0.5))), "knorm scores stored entries alone"),
        (
            Policy(eviction=Adaptive(KeyDiff()), schedule=Schedule(Ratio(0.5))),
            "keydiff:adakv scores stored entries alone",
        ),
    ],
    ids=lambda x: x.name if isinstance(x, Policy) else "",
)
def test_observers_are_refused_for_policies_that_do_not_observe(model, prompts, policy, why):
    with pytest.raises(UserError) as error:
        inference.prefill(model, prompts, policy=policy, observers=prompts)
    assert str(error.value) == (
        f"prefill: observers are for an eviction that observes tokens during prefill, such as snapkv, and {why}"
    )
