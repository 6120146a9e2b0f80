"""Helpers of the engine's tests: the tiny model, engines that serve it, questions, and runs of an engine to its end."""

import functools

import numpy as np
import pytest

from kvjax.engine import Engine
from kvjax.policies import Policy, make_policy
from kvjax.sampling_params import SamplingParams
from tests.inference.delayed import Delayed
from tests.tasks.model_tokenizers import byte_tokenizer
from tests.tiny_models import tiny_model

LONGEST = 128
DELAYED = Policy(Delayed(np.float32(1), np.int32(12), delay=3, biased=True), window=8)
POLICIES = [
    "full",
    "snapkv:ratio=0.5",
    pytest.param(DELAYED, id=DELAYED.name),
    pytest.param("knorm:ratio=0.5,when=chunk,chunk=16", marks=pytest.mark.slow),
    *(
        pytest.param(x, marks=pytest.mark.thorough)
        for x in ("random:ratio=0.4,window=8", "h2o:entries=24,when=position,every=8", "quest:ratio=0.5")
    ),
]
"""Policies of every kind, of which a few are enough in every run."""


@functools.cache
def model():
    return tiny_model(vocab_size=len(byte_tokenizer()), qk_norm=False)


def engine(policy="full", capacity=LONGEST, **options):
    policy = policy if isinstance(policy, Policy) else make_policy(policy, model=model())
    sizes = {"slots": 3, "max_length": LONGEST, "page_size": 4, "chunk": 16, "block": 4}
    return Engine(model(), policy, tokenizer=byte_tokenizer(), capacity=capacity, **sizes | options)


def questions_for(count=7, seed=0, longest=50):
    """Return prompts of random tokens, with greedy sampling of answers of random lengths."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 256, size).tolist() for size in rng.integers(1, longest, count)]
    return [
        (prompt, SamplingParams(max_new_tokens=int(new), ignore_eos=True))
        for prompt, new in zip(prompts, rng.integers(1, 20, count), strict=True)
    ]


def take_turns(engine):
    """Take turns until nothing is left to do."""
    for _ in range(1000):
        if not engine.busy:
            return
        engine.step()
    raise AssertionError("the engine did not come to an end")


def run(engine, requests=()):
    """Take turns until nothing is left to do. Returns the tokens of the requests."""
    take_turns(engine)
    assert_nothing_left(engine)
    return [request.tokens for request in requests]


def assert_nothing_left(engine):
    """Assert that no request is left, and that all pages are free once the forks are forgotten."""
    engine.forget()
    assert engine.stats[:5] == (0, 0, 0, 0, 0)
    assert engine._pool._pages.others is None or not np.asarray(engine._pool._pages.others).any()
    free = np.asarray(engine._pool._pages.free_count)
    assert (free == engine.stats.pool_pages).all()
    free = np.sort(np.asarray(engine._pool._pages.free).reshape(len(free), -1))
    assert (free == np.arange(engine.stats.pool_pages)).all()


def submit(engine, questions):
    """Return the requests for all answers to these questions."""
    return [request for question in questions for request in engine.submit(*question)]


def finished(engine, prompt, sampling, **options):
    """Return the request for the only answer to a prompt, once it has ended."""
    (request,) = engine.submit(prompt, sampling, **options)
    while request.finish_reason is None:
        engine.step()
    return request


def alone(engine, questions):
    """Return the tokens of the first answer to each question, when no other one runs."""
    return [run(engine, engine.submit(*question))[0] for question in questions]


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
