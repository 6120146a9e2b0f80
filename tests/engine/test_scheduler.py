"""Requests begin, pause and end as pages allow, and no answer or page is lost."""

import numpy as np
import pytest

from kvjax.engine.pages import PageCounts
from kvjax.engine.scheduler import Scheduler
from kvjax.mesh import use_mesh
from kvjax.sampling_params import SamplingParams
from tests.engine.serving import (
    LONGEST,
    alone,
    assert_nothing_left,
    engine,
    model,
    questions_for,
    run,
    submit,
    take_turns,
)


@pytest.fixture
def too_few_pages_expected(monkeypatch):
    """Make the engine expect too few pages, so that every request takes more than expected."""
    monkeypatch.setattr(PageCounts, "while_read", lambda self, prompt: 1)
    monkeypatch.setattr(PageCounts, "at_end", lambda self, tokens, prompt: 1)


@pytest.mark.parametrize(
    "policy",
    [
        "quest:ratio=0.5",
        *(pytest.param(x, marks=pytest.mark.thorough) for x in ("full", "random:ratio=0.9,window=8")),
    ],
)
@pytest.mark.usefixtures("too_few_pages_expected")
def test_answers_are_paused_and_resumed_when_pages_run_short(policy):
    served, questions = engine(policy, capacity=24), questions_for(6, longest=30)
    questions = [(prompt, SamplingParams(max_new_tokens=30, ignore_eos=True)) for prompt, _ in questions]
    requests, most_paused = submit(served, questions), 0
    while served.busy:
        served.step()
        assert served.stats.pages <= served.stats.pool_pages
        most_paused = max(most_paused, served.stats.paused)
    assert most_paused > 0
    assert_nothing_left(served)
    assert [request.tokens for request in requests] == alone(served, questions)
    assert {request.finish_reason for request in requests} == {"length"}


@pytest.mark.slow
@pytest.mark.usefixtures("too_few_pages_expected")
def test_pages_that_a_block_will_free_are_not_counted_twice():
    """A policy that compacts while it decodes frees pages in the block that is on its way, while others are taken for
    the prompt that is being read."""
    served = engine("h2o:entries=24,when=position,every=8", capacity=24, block=1)
    rng = np.random.default_rng(1)
    questions = [
        (rng.integers(0, 256, size).tolist(), SamplingParams(max_new_tokens=int(new), ignore_eos=True))
        for size, new in zip(rng.integers(1, 60, 24), rng.integers(1, 40, 24), strict=True)
    ]
    requests = submit(served, questions)
    while served.busy:
        served.step()
        assert (np.asarray(served._pool._pages.free_count) >= 0).all()
    assert_nothing_left(served)
    wanted = alone(served, questions)
    for request, want in zip(requests, wanted, strict=True):
        assert request.tokens == want[: len(request.tokens)]


@pytest.mark.slow
def test_an_answer_of_unknown_length_does_not_block_other_requests():
    """An answer may be as long as the pool is large, but is expected to be shorter."""
    served = engine(capacity=40, block=1)
    sampling = SamplingParams(max_new_tokens=60, ignore_eos=True)
    requests, most_running = [], 0
    for start in (65, 66, 67):
        requests += served.submit([start] * 20, sampling, expected=10)
    while served.busy:
        served.step()
        most_running = max(most_running, served.stats.running)
    assert most_running == 3
    assert [request.tokens for request in requests] == alone(
        served, [(request.prompt, sampling) for request in requests]
    )
    (first,), (second,) = (served.submit([start] * 20, sampling) for start in (65, 66))
    for _ in range(4):
        served.step()
    assert (served.stats.running, served.stats.waiting) == (1, 1)
    first.cancel()
    second.cancel()
    run(served)


def test_a_pool_for_the_longest_answers_of_all_slots_runs_all_slots():
    served = engine(capacity=LONGEST, block=4)
    sampling = SamplingParams(max_new_tokens=LONGEST - 20, ignore_eos=True)
    requests = [request for start in (65, 66, 67) for request in served.submit([start] * 20, sampling)]
    for _ in range(6):
        served.step()
    assert served.stats.running == 3
    for request in requests:
        request.cancel()
    run(served)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [26, 27, 31])
@pytest.mark.usefixtures("too_few_pages_expected")
def test_a_paused_answer_that_no_longer_fits_ends(capacity, monkeypatch):
    """An answer that comes back no longer shares pages with its context, so it needs more of them."""
    monkeypatch.setattr(Scheduler, "pages_needed", lambda *_: 1)
    served = engine(capacity=capacity)
    served.read_context("long", [65] * 40)
    take_turns(served)
    long = SamplingParams(max_new_tokens=60, ignore_eos=True)
    requests = [request for i in range(3) for request in served.submit([66 + i] * 20, long, context="long")]
    for _ in range(1000):
        served.step()
    assert {request.finish_reason for request in requests} <= {"length", "capacity"}
    served.forget("long")
    (last,) = served.submit([70] * 20, SamplingParams(max_new_tokens=5, ignore_eos=True))
    run(served)
    assert last.finish_reason == "length"


@pytest.mark.slow
def test_a_prompt_is_read_in_smaller_steps_where_pages_are_short():
    """The policy keeps less than a step of tokens, but the next step could retain all of them."""
    policy, questions = "streaming_llm:sink=2,window=16", [([65, 66] * 50, SamplingParams(max_new_tokens=5))]
    served = engine(policy, capacity=40, slots=1, chunk=64)
    (request,) = submit(served, questions)
    run(served)
    assert request.finish_reason == "length"
    assert [request.tokens] == alone(engine(policy), questions)


def test_answers_that_are_not_compacted_count_in_full():
    """A prompt of 20 tokens keeps 10, and an answer of 80 all; a head may have a page more."""
    counts, kept = engine("snapkv:ratio=0.5,observed=4")._page_counts, np.full((3, 1, 4), 90)
    with use_mesh(model()):
        held = [counts.held(kept + more, np.array([100])) for more in (0, 4)]
        assert held[0] <= counts.at_end(100, 20) <= held[1]
        assert counts.at_end(100, 100) <= counts.held(kept - 40 + 4, np.array([100]))
        # an admission still drops three of four tokens of an answer of 60
        admits = engine("random:ratio=0.25,window=16+knorm:ratio=0.5")._page_counts
        assert admits.at_end(80, 20) <= admits.held(kept - 90 + 60 // 4 + 4, np.array([80]))


def test_a_cancelled_prompt_that_went_back_into_the_queue_blocks_no_other():
    served = engine(block=1)
    (long,) = served.submit([65] * 10, SamplingParams(max_new_tokens=60, ignore_eos=True))
    served.step()
    (returned,) = served.submit([66] * 10, SamplingParams(max_new_tokens=2))
    served._scheduler._returned = returned
    served.step()
    assert served.stats.waiting == 1
    returned.cancel()
    (other,) = served.submit([67] * 10, SamplingParams(max_new_tokens=2, ignore_eos=True))
    for _ in range(9):
        served.step()
    assert (other.finish_reason, long.finish_reason) == ("length", None)
    long.cancel()
    run(served)


@pytest.mark.usefixtures("too_few_pages_expected")
def test_an_answer_that_runs_alone_ends_when_pages_run_out():
    served = engine(capacity=12)
    long = SamplingParams(max_new_tokens=100, ignore_eos=True)
    first, other = submit(served, [([65] * 20, long), ([66] * 100, SamplingParams(max_new_tokens=5))])
    run(served)
    assert first.finish_reason == "capacity"
    assert 5 < len(first.tokens) < 100
    assert other.finish_reason == "capacity"
    assert other.tokens == []
    (unlimited,) = alone(engine(), [([65] * 20, long)])
    assert unlimited[: len(first.tokens)] == first.tokens


@pytest.mark.slow
@pytest.mark.usefixtures("too_few_pages_expected")
def test_cancelled_requests_end_at_once_and_others_continue():
    served = engine(capacity=24)
    questions = [([65 + i] * 20, SamplingParams(max_new_tokens=40, ignore_eos=True)) for i in range(8)]
    rng, cancelled, requests = np.random.default_rng(0), [], submit(served, questions)
    for turn in range(200):
        served.step()
        if turn % 6 == 3 and len(cancelled) < 6:
            live = [request for request in requests if request.finish_reason is None]
            cancelled.append(live[rng.integers(len(live))])
            cancelled[-1].cancel()
            served.step()
            assert cancelled[-1].finish_reason == "abort"
    run(served)
    wanted = alone(served, questions)
    for request, want in zip(requests, wanted, strict=True):
        assert request.tokens == want[: len(request.tokens)]
        assert (request in cancelled) != (request.tokens == want)


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["full", "random:ratio=0.4,window=8"])
def test_two_thousand_requests_lose_no_page_slot_or_answer(policy):
    """Requests come in bursts, share beginnings, are cancelled, and need more pages than there are."""
    served, rng = engine(policy, capacity=48, slots=4), np.random.default_rng(0)
    texts = [rng.integers(0, 256, size).tolist() for size in (3, 20, 40)]
    kinds = [
        ([*texts[i % 3], *rng.integers(0, 256, rng.integers(1, 30)).tolist()], int(rng.integers(1, 24)))
        for i in range(60)
    ]
    kinds = [(prompt, SamplingParams(max_new_tokens=new, ignore_eos=True)) for prompt, new in kinds]
    wanted, requests, made = alone(served, kinds), [], 0
    while made < 2000 or served.busy:
        if made < 2000 and len(served._scheduler.waiting) < 8 and rng.random() < 0.5:
            for kind in rng.integers(60, size=rng.integers(1, 12)):
                requests += [(kind, request) for request in served.submit(*kinds[kind])]
                made += 1
        served.step()
        if rng.random() < 0.1 and requests:
            requests[-rng.integers(1, min(len(requests), 12) + 1)][1].cancel()
    assert_nothing_left(served)
    ended = [request.finish_reason for _, request in requests]
    assert set(ended) <= {"length", "abort"}
    assert ended.count("length") > 1500
    for kind, request in requests:
        want = wanted[kind][: len(request.tokens)]
        assert request.tokens == want
        assert request.finish_reason == "abort" or len(request.tokens) == kinds[kind][1].max_new_tokens
