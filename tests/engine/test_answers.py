"""Requests that come and go in any order get the answers that they would get alone, and leave nothing behind."""

import jax
import numpy as np
import pytest

from kvjax.cache import CapacityError
from kvjax.engine import Engine
from kvjax.engine.request import Request, refusal
from kvjax.errors import UserError
from kvjax.inference import generate, reconstruction
from kvjax.inference.answers import AnswerLogprobs
from kvjax.llm import output_of
from kvjax.mesh import make_mesh
from kvjax.policies import Policy, make_policy
from kvjax.sampling_params import SamplingParams
from tests.engine.serving import (
    LONGEST,
    POLICIES,
    Cycle,
    alone,
    assert_nothing_left,
    engine,
    model,
    questions_for,
    run,
    submit,
)
from tests.inference.delayed import Delayed
from tests.tasks.model_tokenizers import byte_tokenizer
from tests.tiny_models import tiny_model


@pytest.mark.parametrize("policy", POLICIES)
def test_answers_do_not_depend_on_other_requests(policy):
    served, questions, rng = engine(policy), questions_for(), np.random.default_rng(1)
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
def test_engine_answers_as_generate_does(policy):
    served, questions = engine(policy), questions_for(3)
    answers = run(served, submit(served, questions))
    for tokens, (prompt, sampling) in zip(answers, questions, strict=True):
        want = generate(model(), [prompt], sampling, policy=make_policy(policy, model=model()), page_size=4)
        assert tokens == want.tokens[0].tolist()


def test_a_scored_prompt_is_read_in_steps_of_a_chunk():
    """30 tokens run as 16 and 14, for which pages were reserved at once."""
    served = engine(chunk=64)
    (request,) = served.submit([65] * 30, SamplingParams(max_new_tokens=1), score=True)
    served.step()
    assert served._reader.request is None
    run(served)
    assert sum(len(part.chosen) for part in request.prompt_logprobs) == 29


def test_an_answer_that_ends_without_pages_shows_all_of_its_text():
    """The line feed could have been the beginning of a stop text. There may be no token at all."""
    sampling, tokens = SamplingParams(stop=("\n\n",), logprobs=0), byte_tokenizer()("a\n")["input_ids"]
    requests = [Request(np.array([65]), sampling, 0, 0, (), byte_tokenizer()) for _ in range(2)]
    requests[0].extend(tokens, AnswerLogprobs(np.zeros(2, np.float32), [{}, {}]))
    assert requests[0].text == "a"
    for request, text in zip(requests, ("a\n", ""), strict=True):
        request.end("capacity", np.zeros((3, 1, 4), int), 0, 1)
        output = output_of(0, request)
        assert (output.text, len(output.logprobs)) == (text, len(text))


@pytest.mark.slow
def test_sampling_parameters_give_the_answers_of_generate():
    served, tokenizer = engine(), byte_tokenizer()
    plain = {"max_new_tokens": 12, "ignore_eos": True}
    params = [
        SamplingParams(temperature=1.0, seed=3, logprobs=2, **plain),
        SamplingParams(temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, seed=4, **plain),
        SamplingParams(repetition_penalty=1.5, frequency_penalty=1.0, presence_penalty=-1.0, **plain),
        SamplingParams(logit_bias={65: 100.0}, **plain),
        SamplingParams(**plain),
        SamplingParams(stop_token_ids=[int(x) for x in range(0, 256, 3)], max_new_tokens=12),
    ]
    requests = submit(served, [("Who is Emma?", sampling) for sampling in params])
    run(served)
    for request, sampling in zip(requests, params, strict=True):
        want = generate(model(), ["Who is Emma?"], sampling, tokenizer=tokenizer)
        assert request.answer() == want.tokens[0].tolist()
        assert request.text == want.texts[0]
        assert request.finish_reason == want.finish_reasons[0]
        if sampling.logprobs is not None:
            chosen = np.concatenate([part.chosen for part in request.logprobs])
            np.testing.assert_allclose(chosen, want.logprobs[0].chosen, rtol=1e-4, atol=1e-5)
            first = request.logprobs[0].alternatives[0]
            assert first.keys() == want.logprobs[0].alternatives[0].keys()


@pytest.mark.slow
def test_n_answers_to_a_prompt_differ():
    served = engine()
    sampling = SamplingParams(max_new_tokens=8, temperature=1.0, n=3, ignore_eos=True)
    answers = run(served, served.submit("Who?", sampling))
    want = generate(model(), ["Who?"], sampling, tokenizer=byte_tokenizer())
    assert answers == [tokens.tolist() for tokens in want.tokens]
    assert len({tuple(tokens) for tokens in answers}) == 3


@pytest.mark.slow
def test_other_answers_continue_between_reconstruction_passes(monkeypatch):
    """A turn makes one reconstruction pass, however long the prompt is."""
    passes, one_pass = [], reconstruction.one_pass
    monkeypatch.setattr(
        reconstruction, "one_pass", lambda *args, **options: passes.append(1) or one_pass(*args, **options)
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
    served, one_token = engine(), SamplingParams(max_new_tokens=1, ignore_eos=True)
    (first,) = served.submit("Who is Emma?", one_token)
    run(served)
    stopped = SamplingParams(max_new_tokens=9, ignore_eos=True, stop=(first.text,))
    (request,) = served.submit("Who is Emma?", stopped)
    run(served)
    assert (request.finish_reason, request.text, request.tokens) == ("stop", "", [])


def test_a_constraint_restricts_its_own_answer_only():
    served, questions = engine(), questions_for(4)
    questions = [(prompt, SamplingParams(max_new_tokens=15, ignore_eos=True)) for prompt, _ in questions]
    requests = submit(served, questions[:2])
    drawn = SamplingParams(max_new_tokens=10, ignore_eos=True, temperature=1.0, n=2)
    constrained = served.submit("Say it.", drawn, constraint=lambda: Cycle("abc"))
    requests += submit(served, questions[2:])
    together = run(served, requests)
    assert [request.text for request in constrained] == ["abcabcabca"] * 2
    assert together == alone(served, questions)


@pytest.mark.slow
def test_a_mesh_that_splits_heads_gives_the_same_answers():
    questions = questions_for(4)
    want = alone(engine(), questions)
    with jax.set_mesh(make_mesh(tensor=2)):
        split = tiny_model(vocab_size=len(byte_tokenizer()), qk_norm=False)
    served = Engine(
        split, None, slots=2, max_length=LONGEST, page_size=4, chunk=16, block=4, capacity=LONGEST
    )
    assert run(served, submit(served, questions)) == want


def test_requests_that_cannot_be_served_are_refused(monkeypatch):
    served = engine(capacity=16)
    with pytest.raises(UserError, match=r"a prompt of 100 tokens and an answer of 50 .* max_length=128"):
        served.submit([1] * 100, SamplingParams(max_new_tokens=50))
    with pytest.raises(CapacityError, match=r"is expected to take \d+ pages, and the pool has 144"):
        served.submit([1] * 100, SamplingParams(max_new_tokens=5))
    with pytest.raises(UserError, match="prompt 0 is empty"):
        served.submit([])
    with pytest.raises(UserError, match="compacts while it decodes: .* when=position"):
        engine("knorm:entries=16,when=overflow")
    drop = {"dropped": ((0, 3),), "dropped_at": 3}
    for policy, options, message in (
        ("full", drop, "full does not know the positions of its entries"),
        ("knorm:ratio=0.5,positions=true", drop, "knorm does not decide token by token"),
        (
            "full:positions=true",
            drop | {"dropped": ((2, 2),)},
            r"no such spans of the first 3 of 9 tokens: \(\(2, 2\),\)",
        ),
        ("full:positions=true", drop | {"dropped_at": 9}, "no such spans of the first 9 of 9 tokens"),
        (
            "full:positions=true",
            drop | {"score": True},
            "no tokens can be dropped from .* a prompt that is scored",
        ),
        (
            "full:positions=true",
            drop | {"dropped": (2, 5)},
            r"dropped must be spans \(start, end\), got \(2, 5\)",
        ),
        (
            "full:positions=true",
            drop | {"dropped": ((1, 2.5),)},
            "dropped must be a whole number .*, got 2.5",
        ),
    ):
        with pytest.raises(UserError, match=message):
            engine(policy).submit([1] * 9, SamplingParams(max_new_tokens=5), **options)
    monkeypatch.setattr(Delayed, "revisits", 2)
    late = Policy(Delayed(np.float32(1), None, delay=2), window=8, positions=True)
    assert "does not decide token by token" in refusal(late, knows_positions=True)
    with jax.set_mesh(make_mesh(data=2)):
        split = tiny_model(vocab_size=64, qk_norm=False)
    with pytest.raises(UserError, match="the mesh may split heads alone"):
        Engine(split)
    assert_nothing_left(served)
