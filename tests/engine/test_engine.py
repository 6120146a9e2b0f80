"""Requests that come and go in any order get the answers that they would get alone, and leave nothing behind."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from kvjax.cache import CapacityError
from kvjax.engine import Engine
from kvjax.engine.pages import PageCounts
from kvjax.engine.request import refusal
from kvjax.errors import UserError
from kvjax.inference import generate, prefill, reconstruction, stream
from kvjax.mesh import make_mesh, use_mesh
from kvjax.policies import Policy, make_policy
from kvjax.sampling_params import SamplingParams
from tests.inference.delayed import Delayed, delayed
from tests.tasks.model_tokenizers import byte_tokenizer
from tests.tiny_models import tiny_model

LONGEST = 128
POLICIES = [
    "full",
    "random:ratio=0.4,window=8",
    "snapkv:ratio=0.5",
    "knorm:ratio=0.5,when=chunk,chunk=16",
    "h2o:entries=24,when=position,every=8",
    "quest:ratio=0.5",
    Policy(Delayed(np.float32(1), np.int32(12), delay=3, biased=True), window=8),
]
NAMES = [getattr(policy, "name", policy) for policy in POLICIES]


@functools.cache
def model():
    return tiny_model(vocab_size=len(byte_tokenizer()), qk_norm=False)


def engine(policy="full", capacity=LONGEST, **options):
    made = policy if isinstance(policy, Policy) else make_policy(policy, model=model())
    sizes = {"slots": 3, "max_length": LONGEST, "page_size": 4, "chunk": 16, "block": 4}
    return Engine(model(), made, tokenizer=byte_tokenizer(), capacity=capacity, **sizes | options)


def asked(count=7, seed=0, longest=50):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 256, size).tolist() for size in rng.integers(1, longest, count)]
    return [
        (prompt, SamplingParams(max_new_tokens=int(new), ignore_eos=True))
        for prompt, new in zip(prompts, rng.integers(1, 20, count), strict=True)
    ]


def run(engine, requests=(), most=1000):
    """Take turns until nothing is left to do."""
    for _ in range(most):
        if not engine.busy:
            break
        engine.step()
    assert not engine.busy
    nothing_left(engine)
    return [request.tokens for request in requests]


def nothing_left(engine):
    engine.forget()
    assert engine.stats[:5] == (0, 0, 0, 0, 0)
    assert engine._pool._pages.others is None or not np.asarray(engine._pool._pages.others).any()
    free = np.asarray(engine._pool._pages.free_count)
    assert (free == engine.stats.pool_pages).all()
    free = np.sort(np.asarray(engine._pool._pages.free).reshape(len(free), -1))
    assert (free == np.arange(engine.stats.pool_pages)).all()


def submit(engine, questions):
    return [request for question in questions for request in engine.submit(*question)]


def alone(engine, questions):
    return [run(engine, engine.submit(*question))[0] for question in questions]


@pytest.mark.parametrize("policy", POLICIES, ids=NAMES)
def test_answers_are_those_of_lone_runs(policy):
    served, questions, rng = engine(policy), asked(), np.random.default_rng(1)
    requests = []
    for question in questions:
        requests += served.submit(*question)
        for _ in range(rng.integers(4)):
            served.step()
    together = run(served, requests)
    assert together == alone(served, questions)
    assert len({token for tokens in together for token in tokens}) > 10
    for request, (_, sampling) in zip(requests, questions, strict=True):
        assert request.finish_reason == "length"
        assert len(request.tokens) == sampling.max_new_tokens
        assert 0 < request.kv_ratio <= 1


@pytest.mark.parametrize(
    "policy",
    [
        "snapkv:ratio=0.5",
        *(pytest.param(x, marks=pytest.mark.thorough) for x in ("full", "random:ratio=0.4,window=8")),
    ],
)
def test_answers_are_those_of_generate(policy):
    served, questions = engine(policy), asked(3)
    found = run(served, submit(served, questions))
    for tokens, (prompt, sampling) in zip(found, questions, strict=True):
        want = generate(model(), [prompt], sampling, policy=make_policy(policy, model=model()), page_size=4)
        assert tokens == want.tokens[0].tolist()


def test_answers_are_drawn_as_asked_for():
    served, tokenizer = engine(), byte_tokenizer()
    plain = {"max_new_tokens": 12, "ignore_eos": True}
    each = [
        SamplingParams(temperature=1.0, seed=3, logprobs=2, **plain),
        SamplingParams(temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, seed=4, **plain),
        SamplingParams(repetition_penalty=1.5, frequency_penalty=1.0, presence_penalty=-1.0, **plain),
        SamplingParams(logit_bias={65: 100.0}, **plain),
        SamplingParams(**plain),
        SamplingParams(stop_token_ids=[int(x) for x in range(0, 256, 3)], max_new_tokens=12),
    ]
    requests = submit(served, [("Who is Emma?", one) for one in each])
    run(served)
    for request, one in zip(requests, each, strict=True):
        want = generate(model(), ["Who is Emma?"], one, tokenizer=tokenizer)
        assert request.answer() == want.tokens[0].tolist()
        assert request.text == want.texts[0]
        assert request.finish_reason == want.finish_reasons[0]
        if one.logprobs is not None:
            chosen = np.concatenate([part.chosen for part in request.logprobs])
            np.testing.assert_allclose(chosen, want.logprobs[0].chosen, rtol=1e-4, atol=1e-5)
            first = request.logprobs[0].alternatives[0]
            assert first.keys() == want.logprobs[0].alternatives[0].keys()


def test_the_answers_of_a_prompt_are_drawn_apart():
    served = engine()
    sampling = SamplingParams(max_new_tokens=8, temperature=1.0, n=3, ignore_eos=True)
    found = run(served, served.submit("Who?", sampling))
    want = generate(model(), ["Who?"], sampling, tokenizer=byte_tokenizer())
    assert found == [tokens.tolist() for tokens in want.tokens]
    assert len({tuple(tokens) for tokens in found}) == 3


def test_other_answers_go_on_between_reconstruction_passes(monkeypatch):
    """A turn makes one pass, however long the prompt is."""
    passes, own = [], reconstruction.one_pass
    monkeypatch.setattr(
        reconstruction, "one_pass", lambda *args, **options: passes.append(1) or own(*args, **options)
    )
    made = make_policy("kvzip:ratio=0.5,repeated=16", model=model(), tokenizer=byte_tokenizer())
    sizes = {"slots": 2, "max_length": 192, "page_size": 4, "chunk": 32, "block": 2, "capacity": 192}
    served = Engine(model(), made, tokenizer=byte_tokenizer(), **sizes)
    questions = [(list(range(size)), SamplingParams(max_new_tokens=60, ignore_eos=True)) for size in (5, 60)]
    short, long = submit(served, questions)
    tokens = []
    while not long.tokens:
        before = len(passes)
        served.step()
        if (made := len(passes) - before) and short.tokens:
            assert made == 1
            tokens.append(len(short.tokens))
    assert len(tokens) == 4
    assert np.diff(tokens).min() > 0
    run(served)
    assert [short.tokens, long.tokens] == alone(served, questions)


def test_a_stop_text_ends_an_answer_and_is_not_part_of_it():
    served = engine()
    (free,) = served.submit("Who is Emma?", SamplingParams(max_new_tokens=30, ignore_eos=True))
    run(served)
    stop = free.text[5:8]
    stopped = SamplingParams(max_new_tokens=30, ignore_eos=True, stop=(stop,))
    (request,) = served.submit("Who is Emma?", stopped)
    run(served)
    assert (request.finish_reason, request.text) == ("stop", free.text[: free.text.index(stop)])
    assert free.tokens[: len(request.answer())] == request.answer()


def test_a_stop_text_may_be_the_first_token():
    served, one = engine(), SamplingParams(max_new_tokens=1, ignore_eos=True)
    (first,) = served.submit("Who is Emma?", one)
    run(served)
    stopped = SamplingParams(max_new_tokens=9, ignore_eos=True, stop=(first.text,))
    (request,) = served.submit("Who is Emma?", stopped)
    run(served)
    assert (request.finish_reason, request.text, request.tokens) == ("stop", "", [])


@pytest.fixture
def surprised(monkeypatch):
    """Make the engine expect too few pages, so that everything takes more than expected."""
    monkeypatch.setattr(PageCounts, "while_read", lambda self, prompt: 1)
    monkeypatch.setattr(PageCounts, "at_end", lambda self, tokens: 1)


@pytest.mark.parametrize("policy", ["full", "random:ratio=0.9,window=8", "quest:ratio=0.5"])
@pytest.mark.usefixtures("surprised")
def test_where_pages_run_short_answers_are_paused_and_none_is_lost(policy):
    served, questions = engine(policy, capacity=24), asked(6, longest=30)
    questions = [(prompt, SamplingParams(max_new_tokens=30, ignore_eos=True)) for prompt, _ in questions]
    requests, most = submit(served, questions), 0
    while served.busy:
        served.step()
        assert served.stats.pages <= served.stats.pool_pages
        most = max(most, served.stats.paused)
    assert most > 0
    nothing_left(served)
    assert [request.tokens for request in requests] == alone(served, questions)
    assert {request.finish_reason for request in requests} == {"length"}


@pytest.mark.usefixtures("surprised")
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
    nothing_left(served)
    wanted = alone(served, questions)
    for request, want in zip(requests, wanted, strict=True):
        assert request.tokens == want[: len(request.tokens)]


def test_an_answer_of_unknown_length_does_not_keep_others_out():
    """An answer may be as long as the pool is large, but is expected to be shorter."""
    served = engine(capacity=40, block=1)
    sampling = SamplingParams(max_new_tokens=60, ignore_eos=True)
    requests, most = [], 0
    for start in (65, 66, 67):
        requests += served.submit([start] * 20, sampling, expected=10)
    while served.busy:
        served.step()
        most = max(most, served.stats.running)
    assert most == 3
    assert [one.tokens for one in requests] == alone(served, [(one.prompt, sampling) for one in requests])
    (first,), (second,) = (served.submit([start] * 20, sampling) for start in (65, 66))
    for _ in range(4):
        served.step()
    assert (served.stats.running, served.stats.waiting) == (1, 1)
    first.cancel()
    second.cancel()
    run(served)


def test_all_slots_are_used_of_a_pool_that_is_as_large_as_they_may_need():
    served = engine(capacity=LONGEST, block=4)
    sampling = SamplingParams(max_new_tokens=LONGEST - 20, ignore_eos=True)
    requests = [one for start in (65, 66, 67) for one in served.submit([start] * 20, sampling)]
    for _ in range(6):
        served.step()
    assert served.stats.running == 3
    for one in requests:
        one.cancel()
    run(served)


def test_a_prompt_keeps_the_fork_that_it_goes_on_from():
    """Other forks are dropped to free pages for the prompt."""
    served, short = engine(capacity=40), SamplingParams(max_new_tokens=4, ignore_eos=True)
    for start in (65, 66):
        served.submit([start] * 40, short)
        while served.busy:
            served.step()
    (again,) = served.submit([65] * 40 + [70] * 10, SamplingParams(max_new_tokens=40, ignore_eos=True))
    run(served, [again])
    assert again.cached == 40


@pytest.mark.parametrize("capacity", [26, 27, 31])
@pytest.mark.usefixtures("surprised")
def test_a_paused_answer_that_will_never_fit_again_ends(capacity, monkeypatch):
    """The pages that it shared with its context are its own when it comes back."""
    monkeypatch.setattr(Engine, "_need", lambda *_: 1)
    served = engine(capacity=capacity)
    served.read_context("long", [65] * 40)
    while served.busy:
        served.step()
    most = SamplingParams(max_new_tokens=60, ignore_eos=True)
    requests = [one for i in range(3) for one in served.submit([66 + i] * 20, most, context="long")]
    for _ in range(1000):
        served.step()
    assert {request.finish_reason for request in requests} <= {"length", "capacity"}
    served.forget("long")
    (last,) = served.submit([70] * 20, SamplingParams(max_new_tokens=5, ignore_eos=True))
    run(served)
    assert last.finish_reason == "length"


@pytest.mark.usefixtures("surprised")
def test_an_answer_that_can_go_no_further_ends_with_what_it_has():
    served = engine(capacity=12)
    long = SamplingParams(max_new_tokens=100, ignore_eos=True)
    first, other = submit(served, [([65] * 20, long), ([66] * 100, SamplingParams(max_new_tokens=5))])
    run(served)
    assert first.finish_reason == "capacity"
    assert 5 < len(first.tokens) < 100
    assert other.finish_reason == "capacity"
    assert other.tokens == []
    (whole,) = alone(engine(), [([65] * 20, long)])
    assert whole[: len(first.tokens)] == first.tokens


@pytest.mark.usefixtures("surprised")
def test_what_is_cancelled_leaves_at_once_and_others_go_on():
    served = engine(capacity=24)
    questions = [([65 + i] * 20, SamplingParams(max_new_tokens=40, ignore_eos=True)) for i in range(8)]
    rng, ended, requests = np.random.default_rng(0), [], submit(served, questions)
    for turn in range(200):
        served.step()
        if turn % 6 == 3 and len(ended) < 6:
            going = [request for request in requests if request.finish_reason is None]
            ended.append(going[rng.integers(len(going))])
            ended[-1].cancel()
            served.step()
            assert ended[-1].finish_reason == "abort"
    run(served)
    wanted = alone(served, questions)
    for request, want in zip(requests, wanted, strict=True):
        assert request.tokens == want[: len(request.tokens)]
        assert (request in ended) != (request.tokens == want)


@pytest.mark.parametrize("policy", POLICIES, ids=NAMES)
def test_a_prompt_goes_on_from_an_earlier_one_that_it_begins_with(policy):
    """If the policy decides token by token, the next turns of a conversation and questions about one text go on from it
    too."""
    served = engine(policy)
    causal = served._policy.host.schedule is None
    text, short = list(range(3, 37)), SamplingParams(max_new_tokens=6, ignore_eos=True)
    asked = [(text, short), ([*text, 7, 8, 9], short), ([*text, 9, 9], short), (text, short)]
    answers, cached = [], []
    for prompt, sampling in asked:
        (request,) = served.submit(prompt, sampling)
        while request.finish_reason is None:
            served.step()
        answers.append(request.tokens)
        cached.append(request.cached)
    following = [*asked[1][0], *answers[1], 5]
    (request,) = served.submit(following, short)
    while request.finish_reason is None:
        served.step()
    size = len(text)
    assert [*cached, request.cached] == ([0, size, size, size, size + 3] if causal else [0] * 5)
    run(served)
    for (prompt, sampling), tokens in zip(
        [*asked, (following, short)], [*answers, request.tokens], strict=True
    ):
        assert alone(engine(policy), [(prompt, sampling)]) == [tokens]


@pytest.mark.parametrize("policy", ["full", "random:ratio=0.4,window=8"])
def test_a_prompt_goes_on_from_the_end_that_an_earlier_one_kept(policy):
    """The beginning of an answer's turn is not part of what chat templates show of earlier turns."""
    served, turns, short = (
        engine(policy),
        list(range(3, 33)),
        SamplingParams(max_new_tokens=6, ignore_eos=True),
    )
    prompts, found = ([*turns, 1, 2], [*turns, 9, 8, 7, 1, 2], [*turns, 1, 2]), []
    for prompt in prompts:
        (request,) = served.submit(prompt, short, kept=len(prompt) - 2)
        while request.finish_reason is None:
            served.step()
        found.append(request)
    assert [request.cached for request in found] == [0, 30, 30]
    run(served)
    questions = [(prompt, short) for prompt in prompts]
    assert [request.tokens for request in found] == alone(engine(policy), questions)


@pytest.mark.parametrize(
    "policy",
    [
        "random:ratio=0.4,window=8,positions=true",
        pytest.param("full:positions=true", marks=pytest.mark.thorough),
    ],
)
def test_a_conversation_goes_on_without_what_it_drops(policy):
    """Earlier prompts saw it, and later ones do not, whether they drop it or go on from where it was dropped. Those
    that do not drop it go on from the earlier ones."""
    served, short = engine(policy), SamplingParams(max_new_tokens=6, ignore_eos=True)
    made = make_policy(policy, model=model())
    first = np.random.default_rng(7).integers(0, 256, 36).tolist()
    second, spans = [*first, *range(10, 20)], ((5, 20), (30, 34))

    def wanted(*steps, end):
        """Return the answer to a prompt whose spans are dropped once so many of its tokens were read."""
        cache, read = None, 0
        for (start, stop), at in steps:
            if at > read:
                part = [end[read:at]]
                if cache is None:
                    cache = prefill(model(), part, policy=made, page_size=4)
                else:
                    blocks = stream(
                        model(), part, dataclasses.replace(short, max_new_tokens=1), policy=made, cache=cache
                    )
                    cache = next(blocks).cache
                read = at
            cache = cache.without(0, start, stop)
        return generate(model(), [end[read:]], short, policy=made, cache=cache).tokens[0].tolist()

    def said(prompt, **options):
        (request,) = served.submit(prompt, short, **options)
        while request.finish_reason is None:
            served.step()
        return request.tokens, request.cached

    whole = said(first)[0]
    pages = served.stats.pages
    # the tokens up to 40 still see the span
    third = [*second, 7, 8]
    assert said(second, dropped=spans[:1], dropped_at=40) == (wanted((spans[0], 40), end=second), 36)
    assert said(second, dropped=spans[:1], dropped_at=40)[1] == 46
    both = wanted((spans[0], 40), (spans[1], 46), end=third)
    assert said(third, dropped=spans, dropped_at=34) == (both, 46)
    assert said(third)[1] == 36
    assert said(first) == (whole, 36)
    assert served.stats.pages > pages
    served.forget()
    # read at once, what is dropped is seen up to where the prompt says
    assert said(second, dropped=spans[:1], dropped_at=40) == (wanted((spans[0], 40), end=second), 0)
    run(served)


def test_a_drop_in_a_tight_pool_takes_no_page_that_is_not_free():
    """A fork shares pages with the sequence that drops. It is dropped itself if there are too few pages for copies."""
    served, short = (
        engine("full:window=8,positions=true", capacity=36, slots=2),
        SamplingParams(max_new_tokens=6),
    )
    pages, moved, copied = served.stats.pool_pages, 0, []

    def said(prompt, **options):
        nonlocal moved
        (request,) = served.submit(prompt, dataclasses.replace(short, ignore_eos=True), **options)
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
    said(first)
    dropped = {"dropped": ((9, 20), (42, 46)), "dropped_at": 46}
    copied.clear()
    answer, cached = said([*first, *range(10, 18)], **dropped)
    # of the fork's 8 whole pages in each of 12 head caches, 2 are before the spans
    assert (cached, copied[0]) == (40, 6 * 12)
    assert moved
    served.forget()
    assert said([*first, *range(10, 18)], **dropped) == (answer, 0)
    run(served)


def test_forks_are_found_by_the_tokens_that_they_dropped():
    served, short = (
        engine("random:ratio=0.4,window=8,positions=true"),
        SamplingParams(max_new_tokens=6, ignore_eos=True),
    )
    prompt = np.random.default_rng(7).integers(0, 256, 46).tolist()

    def cached(prompt, *dropped):
        (request,) = served.submit(prompt, short, dropped=dropped, dropped_at=40)
        while request.finish_reason is None:
            served.step()
        return request.cached, request.dropped

    assert cached(prompt, (2, 4)) == (0, ((2, 4),))
    assert cached(prompt, [2, 5.0], np.array([2, 5])) == (0, ((2, 5),))
    assert cached(prompt, (2, 5)) == (46, ((2, 5),))
    assert cached(prompt, (2, 5), (8, 20)) == (0, ((2, 5), (8, 20)))
    assert cached([*prompt, 7], (8, 12), (0, 4), (3, 5), (12, 20)) == (46, ((0, 5), (8, 20)))
    run(served)


def test_a_request_whose_tokens_cannot_be_dropped_yet_ends_alone():
    """The admission rates a token two tokens later, and the window has tokens before the span."""
    policy = Policy(Delayed(np.float32(1), None, delay=2), window=8, positions=True)
    served, short = engine(policy, slots=2), SamplingParams(max_new_tokens=3, ignore_eos=True)
    (other,) = served.submit([65] * 20, short)
    (early,) = served.submit([66] * 20, short, dropped=((0, 2), (10, 12)), dropped_at=12)
    (late,) = served.submit([66] * 20, short, dropped=((0, 2), (10, 12)), dropped_at=19)
    run(served)
    assert [one.finish_reason for one in (other, early, late)] == ["length", "abort", "length"]


@pytest.mark.parametrize("policy", ["full", "snapkv:ratio=0.5", "h2o:entries=24,when=position,every=8"])
def test_a_context_is_read_and_asked_by_its_name(policy):
    """This holds also where the end of the context decides what is kept of it. Each question is asked as if it were the
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
    requests = [request for one in questions for request in served.submit(one, short, context="night")]
    for _ in range(500):
        served.step()
    made = make_policy(policy, model=model())
    held = prefill(model(), [text], policy=made, tokenizer=byte_tokenizer(), page_size=4)
    for request, question in zip(requests, questions, strict=True):
        want = generate(
            model(),
            [question],
            short,
            tokenizer=byte_tokenizer(),
            policy=make_policy(policy, model=model()),
            cache=held,
        )
        assert request.tokens == want.tokens[0].tolist()
        assert request.cached == read.prompt.size
    late = served.submit("Where?", short, context="night")
    served.forget("night")
    with pytest.raises(UserError, match="no context 'night' was read"):
        served.forget("night")
    run(served)
    assert late[0].finish_reason == "abort"


class Cycle:
    """A constraint that allows the tokens of a text in turn, again and again."""

    error = None

    def __init__(self, text):
        self._tokens, self._place = byte_tokenizer()(text)["input_ids"], 0

    def allowed(self):
        allowed = np.zeros(len(byte_tokenizer()), bool)
        allowed[self._tokens[self._place % len(self._tokens)]] = True
        return allowed

    def take(self, token):
        assert token == self._tokens[self._place % len(self._tokens)]
        self._place += 1


def test_a_constraint_says_which_tokens_come_and_leaves_other_answers_alone():
    served, questions = engine(), asked(4)
    questions = [(prompt, SamplingParams(max_new_tokens=15, ignore_eos=True)) for prompt, _ in questions]
    requests = submit(served, questions[:2])
    drawn = SamplingParams(max_new_tokens=10, ignore_eos=True, temperature=1.0, n=2)
    held = served.submit("Say it.", drawn, constraint=lambda: Cycle("abc"))
    requests += submit(served, questions[2:])
    together = run(served, requests)
    assert [request.text for request in held] == ["abcabcabca"] * 2
    assert together == alone(served, questions)


@pytest.mark.parametrize(
    "policy",
    [
        "full",
        *(
            pytest.param(x, marks=pytest.mark.thorough)
            for x in ("snapkv:ratio=0.5", "full:window=8,positions=true")
        ),
    ],
)
def test_warmed_up_it_compiles_nothing_more(policy, caplog):
    served = engine(policy, slots=5, chunk=64)
    questions = [
        *asked(10, seed=5, longest=80),
        ([5] * 9, SamplingParams(max_new_tokens=9, temperature=0.5, top_k=3)),
        ([5] * 9 + [6] * 3, SamplingParams(max_new_tokens=9)),
        ([5] * 9 + [7] * 40, SamplingParams(max_new_tokens=9)),
    ]
    ended = SamplingParams(max_new_tokens=9, stop_token_ids=range(20), logit_bias={3: 1.0}, logprobs=4)

    def compiled():
        return [record.message for record in caplog.records if record.message.startswith("Compiling")]

    with jax.log_compiles():
        served.warm_up(constrained=True)
        assert compiled()
        caplog.clear()
        requests = submit(served, [*questions, ("Who?", ended)])
        requests += served.submit("Say it.", ended, constraint=lambda: Cycle("abc"))
        if policy == "full":
            requests += served.submit("Say it, do.", ended, score=True)
        if "positions" in policy:
            dropped = {"dropped": ((3, 40), (50, 55)), "dropped_at": 60}
            requests += served.submit([5] * 9 + [7] * 60, questions[-1][1], **dropped)
        for _ in range(10):
            served.step()
        with use_mesh(model()):
            served._pause(served._slots.running[0][0])
        run(served, requests)
        assert not compiled()


def test_warming_up_drops_nothing_where_that_is_refused():
    """The positions of entries are known with max_entries."""
    served = engine(delayed(window=8, max_entries=9, delay=2), max_length=10)
    assert served._pool.knows_positions
    served.warm_up()
    run(served)


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["full", "random:ratio=0.4,window=8"])
def test_two_thousand_requests_of_all_kinds(policy):
    """They come in bursts, share beginnings, are cancelled, and take more pages than there are. No page, slot or answer
    is lost."""
    served, rng = engine(policy, capacity=48, slots=4), np.random.default_rng(0)
    texts = [rng.integers(0, 256, size).tolist() for size in (3, 20, 40)]
    kinds = [
        ([*texts[i % 3], *rng.integers(0, 256, rng.integers(1, 30)).tolist()], int(rng.integers(1, 24)))
        for i in range(60)
    ]
    kinds = [(prompt, SamplingParams(max_new_tokens=new, ignore_eos=True)) for prompt, new in kinds]
    wanted, requests, made = alone(served, kinds), [], 0
    while made < 2000 or served.busy:
        if made < 2000 and len(served._waiting) < 8 and rng.random() < 0.5:
            for kind in rng.integers(60, size=rng.integers(1, 12)):
                requests += [(kind, request) for request in served.submit(*kinds[kind])]
                made += 1
        served.step()
        if rng.random() < 0.1 and requests:
            requests[-rng.integers(1, min(len(requests), 12) + 1)][1].cancel()
    nothing_left(served)
    ended = [request.finish_reason for _, request in requests]
    assert set(ended) <= {"length", "abort"}
    assert ended.count("length") > 1500
    for kind, request in requests:
        want = wanted[kind][: len(request.tokens)]
        assert request.tokens == want
        assert request.finish_reason == "abort" or len(request.tokens) == kinds[kind][1].max_new_tokens


def test_on_a_mesh_that_splits_heads():
    questions = asked(4)
    want = alone(engine(), questions)
    with jax.set_mesh(make_mesh(tensor=2)):
        split = tiny_model(vocab_size=len(byte_tokenizer()), qk_norm=False)
    served = Engine(
        split, None, slots=2, max_length=LONGEST, page_size=4, chunk=16, block=4, capacity=LONGEST
    )
    assert run(served, submit(served, questions)) == want


def test_what_cannot_be_served_is_refused_in_a_line(monkeypatch):
    served = engine(capacity=16)
    with pytest.raises(UserError, match=r"a prompt of 100 tokens and an answer of 50 .* max_length=128"):
        served.submit([1] * 100, SamplingParams(max_new_tokens=50))
    with pytest.raises(CapacityError, match=r"is expected to take \d+ pages, and the pool has 144"):
        served.submit([1] * 100, SamplingParams(max_new_tokens=5))
    with pytest.raises(UserError, match="prompt 0 is empty"):
        served.submit([])
    with pytest.raises(UserError, match="compacts while it decodes: .* when=position"):
        engine("knorm:entries=16,when=overflow")
    one = {"dropped": ((0, 3),), "dropped_at": 3}
    for policy, options, said in (
        ("full", one, "full does not know the positions of its entries"),
        ("knorm:ratio=0.5,positions=true", one, "knorm does not decide token by token"),
        (
            "full:positions=true",
            one | {"dropped": ((2, 2),)},
            r"no such spans of the first 3 of 9 tokens: \(\(2, 2\),\)",
        ),
        ("full:positions=true", one | {"dropped_at": 9}, "no such spans of the first 9 of 9 tokens"),
        ("full:positions=true", one | {"score": True}, "nothing is dropped from .* a prompt that is scored"),
        (
            "full:positions=true",
            one | {"dropped": (2, 5)},
            r"dropped must be spans \(start, end\), got \(2, 5\)",
        ),
        ("full:positions=true", one | {"dropped": ((1, 2.5),)}, "dropped must be a whole number .*, got 2.5"),
    ):
        with pytest.raises(UserError, match=said):
            engine(policy).submit([1] * 9, SamplingParams(max_new_tokens=5), **options)
    monkeypatch.setattr(Delayed, "revisits", 2)
    late = Policy(Delayed(np.float32(1), None, delay=2), window=8, positions=True)
    assert "does not decide token by token" in refusal(late, knows_positions=True)
    with jax.set_mesh(make_mesh(data=2)):
        split = tiny_model(vocab_size=64, qk_norm=False)
    with pytest.raises(UserError, match="the mesh may split heads alone"):
        Engine(split)
    nothing_left(served)
