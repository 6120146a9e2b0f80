"""Prompts continue earlier prompts and named contexts from forks, also without the tokens that they drop."""

import dataclasses

import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.inference import generate, prefill, stream
from kvjax.mesh import use_mesh
from kvjax.policies import Policy, make_policy
from kvjax.sampling_params import SamplingParams
from tests.engine.serving import POLICIES, alone, engine, finished, model, run, take_turns
from tests.inference.delayed import Delayed
from tests.tasks.model_tokenizers import byte_tokenizer

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_continues_an_earlier_prompt_that_it_begins_with(policy):
    """With a policy that decides token by token, later turns of a conversation and questions about one text are not
    read from the beginning."""
    served = engine(policy)
    causal = served._policy.host.schedule is None
    text, short = list(range(3, 37)), SamplingParams(max_new_tokens=6, ignore_eos=True)
    questions = [(text, short), ([*text, 7, 8, 9], short), ([*text, 9, 9], short), (text, short)]
    answers, cached = [], []
    for prompt, sampling in questions:
        request = finished(served, prompt, sampling)
        answers.append(request.tokens)
        cached.append(request.cached)
    following = [*questions[1][0], *answers[1], 5]
    request = finished(served, following, short)
    size = len(text)
    assert [*cached, request.cached] == ([0, size, size, size, size + 3] if causal else [0] * 5)
    run(served)
    for (prompt, sampling), tokens in zip(
        [*questions, (following, short)], [*answers, request.tokens], strict=True
    ):
        assert alone(engine(policy), [(prompt, sampling)]) == [tokens]


@pytest.mark.parametrize("policy", ["full", "random:ratio=0.4,window=8"])
def test_a_prompt_continues_the_kept_part_of_an_earlier_prompt(policy):
    """Chat templates do not repeat the beginning of an answer's turn in later prompts."""
    served, short = engine(policy), SamplingParams(max_new_tokens=6, ignore_eos=True)
    turns = list(range(3, 33))
    prompts, requests = ([*turns, 1, 2], [*turns, 9, 8, 7, 1, 2], [*turns, 1, 2]), []
    for prompt in prompts:
        requests.append(finished(served, prompt, short, kept=len(prompt) - 2))
    assert [request.cached for request in requests] == [0, 30, 30]
    run(served)
    questions = [(prompt, short) for prompt in prompts]
    assert [request.tokens for request in requests] == alone(engine(policy), questions)


def test_the_fork_that_a_prompt_continues_is_not_dropped():
    """Other forks are dropped to free pages for the prompt."""
    served, short = engine(capacity=40), SamplingParams(max_new_tokens=4, ignore_eos=True)
    for start in (65, 66):
        served.submit([start] * 40, short)
        take_turns(served)
    (again,) = served.submit([65] * 40 + [70] * 10, SamplingParams(max_new_tokens=40, ignore_eos=True))
    run(served, [again])
    assert again.cached == 40


@pytest.mark.parametrize(
    "policy",
    [
        "random:ratio=0.4,window=8,positions=true",
        pytest.param("full:positions=true", marks=pytest.mark.thorough),
    ],
)
def test_a_conversation_does_not_see_dropped_spans(policy):
    """Earlier prompts see the span. Later ones that drop it do not, whether they drop it themselves or continue a
    prompt that did. Prompts that do not drop it continue the earlier ones."""
    served, short = engine(policy), SamplingParams(max_new_tokens=6, ignore_eos=True)
    made_policy = make_policy(policy, model=model())
    first = np.random.default_rng(7).integers(0, 256, 36).tolist()
    second, spans = [*first, *range(10, 20)], ((5, 20), (30, 34))

    def wanted(*steps, end):
        """Return the answer to a prompt, given its spans and the number of tokens that are read before each drop."""
        cache, read = None, 0
        for (start, stop), at in steps:
            if at > read:
                part = [end[read:at]]
                if cache is None:
                    cache = prefill(model(), part, policy=made_policy, page_size=4)
                else:
                    blocks = stream(
                        model(),
                        part,
                        dataclasses.replace(short, max_new_tokens=1),
                        policy=made_policy,
                        cache=cache,
                    )
                    cache = next(blocks).cache
                read = at
            cache = cache.without(0, start, stop)
        return generate(model(), [end[read:]], short, policy=made_policy, cache=cache).tokens[0].tolist()

    def answer_to(prompt, **options):
        request = finished(served, prompt, short, **options)
        return request.tokens, request.cached

    without_drops = answer_to(first)[0]
    pages = served.stats.pages
    # the tokens up to 40 still see the span
    third = [*second, 7, 8]
    assert answer_to(second, dropped=spans[:1], dropped_at=40) == (wanted((spans[0], 40), end=second), 36)
    assert answer_to(second, dropped=spans[:1], dropped_at=40)[1] == 46
    both_dropped = wanted((spans[0], 40), (spans[1], 46), end=third)
    assert answer_to(third, dropped=spans, dropped_at=34) == (both_dropped, 46)
    assert answer_to(third)[1] == 36
    assert answer_to(first) == (without_drops, 36)
    assert served.stats.pages > pages
    served.forget()
    # read again from the beginning, the tokens up to 40 see the span too
    assert answer_to(second, dropped=spans[:1], dropped_at=40) == (wanted((spans[0], 40), end=second), 0)
    run(served)


def test_dropping_in_a_small_pool_takes_free_pages_only():
    """A fork shares pages with the sequence that drops a span. The fork is freed if there are too few pages for
    copies."""
    served = engine("full:window=8,positions=true", capacity=36, slots=2)
    short = SamplingParams(max_new_tokens=6, ignore_eos=True)
    pages, moved, copied = served.stats.pool_pages, 0, []

    def answer_to(prompt, **options):
        nonlocal moved
        (request,) = served.submit(prompt, short, **options)
        while request.finish_reason is None:
            served.step()
            rows = [served._pool._slots, *(fork.row for fork in served._forks._unnamed)]
            if served._reader.request is not None:
                rows.append(served._reader._row)
                with use_mesh(model()):
                    copied.append(served._reader.copied)
            held = np.unique(np.concatenate([np.asarray(row.layers.page_table).ravel() for row in rows]))
            assert (held < pages).sum() == pages - int(np.asarray(served._pool._pages.free_count)[0])
            np.testing.assert_array_equal(served._slots._origin, np.asarray(served._pool._slots.origin))
            moved = max(moved, served._slots._origin.max())
        assert request.finish_reason == "length"
        return request.tokens, request.cached

    first = np.random.default_rng(7).integers(0, 256, 40).tolist()
    answer_to(first)
    dropped = {"dropped": ((9, 20), (42, 46)), "dropped_at": 46}
    copied.clear()
    answer, cached = answer_to([*first, *range(10, 18)], **dropped)
    # of the fork's 8 whole pages in each of 12 head caches, 2 are before the spans
    assert (cached, copied[0]) == (40, 6 * 12)
    assert moved
    served.forget()
    assert answer_to([*first, *range(10, 18)], **dropped) == (answer, 0)
    run(served)


def test_a_fork_is_continued_only_if_it_dropped_the_same_tokens():
    served = engine("random:ratio=0.4,window=8,positions=true")
    short = SamplingParams(max_new_tokens=6, ignore_eos=True)
    prompt = np.random.default_rng(7).integers(0, 256, 46).tolist()

    def cached(prompt, *dropped):
        request = finished(served, prompt, short, dropped=dropped, dropped_at=40)
        return request.cached, request.dropped

    assert cached(prompt, (2, 4)) == (0, ((2, 4),))
    assert cached(prompt, [2, 5.0], np.array([2, 5])) == (0, ((2, 5),))
    assert cached(prompt, (2, 5)) == (46, ((2, 5),))
    assert cached(prompt, (2, 5), (8, 20)) == (0, ((2, 5), (8, 20)))
    assert cached([*prompt, 7], (8, 12), (0, 4), (3, 5), (12, 20)) == (46, ((0, 5), (8, 20)))
    run(served)


def test_a_request_whose_tokens_cannot_be_dropped_yet_ends_and_others_continue():
    """The admission rates a token two tokens later, and the window has tokens before the span."""
    policy = Policy(Delayed(np.float32(1), None, delay=2), window=8, positions=True)
    served, short = engine(policy, slots=2), SamplingParams(max_new_tokens=3, ignore_eos=True)
    (other,) = served.submit([65] * 20, short)
    (early,) = served.submit([66] * 20, short, dropped=((0, 2), (10, 12)), dropped_at=12)
    (late,) = served.submit([66] * 20, short, dropped=((0, 2), (10, 12)), dropped_at=19)
    run(served)
    assert [request.finish_reason for request in (other, early, late)] == ["length", "abort", "length"]


@pytest.mark.parametrize("policy", ["full", "snapkv:ratio=0.5", "h2o:entries=24,when=position,every=8"])
def test_questions_continue_a_named_context(policy):
    """This holds also if the eviction compacts at the end of the context. Each question is answered as if it were the
    only one."""
    served, text = engine(policy), "It was a dark and stormy night; the rain fell in torrents."
    short = SamplingParams(max_new_tokens=6, ignore_eos=True)
    read = served.read_context("night", text)
    with pytest.raises(UserError, match="a context 'night' was read before"):
        served.read_context("night", text)
    with pytest.raises(UserError, match="no context 'night' was read"):
        served.submit("Who?", short, context="night")
    while read.finish_reason is None:
        served.step()
    questions = ["Who?", "When?", "Why does it rain?"]
    requests = [
        request for question in questions for request in served.submit(question, short, context="night")
    ]
    for _ in range(500):
        served.step()
    made_policy = make_policy(policy, model=model())
    context_cache = prefill(model(), [text], policy=made_policy, tokenizer=byte_tokenizer(), page_size=4)
    for request, question in zip(requests, questions, strict=True):
        want = generate(
            model(), [question], short, tokenizer=byte_tokenizer(), policy=made_policy, cache=context_cache
        )
        assert request.tokens == want.tokens[0].tolist()
        assert request.cached == read.prompt.size
    late = served.submit("Where?", short, context="night")
    served.forget("night")
    with pytest.raises(UserError, match="no context 'night' was read"):
        served.forget("night")
    run(served)
    assert late[0].finish_reason == "abort"
