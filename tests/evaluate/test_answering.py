"""Tests of answers against plain attention over context, question and answer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cli.stopwatch import Pace, Stopwatch
from kvjax.evaluate import answering
from kvjax.evaluate.answering import answer
from kvjax.inference import logits, prefill
from kvjax.inference.footprint_log import footprint_log
from kvjax.policies import make_policy
from kvjax.tasks import Question
from tests.tiny_models import sliding_model, tiny_gates, tiny_model

LINE = 40


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def contexts():
    return [np.random.default_rng(seed).integers(0, 61, 20).astype(np.int32) for seed in range(3)]


class Counted(Pace):
    """A pace that also counts the tokens that were added."""

    tokens = 0

    def add(self, tokens, seconds, compiled):
        self.tokens += tokens
        super().add(tokens, seconds, compiled)


def attention_tokens(model, line, count):
    """Return the most likely next token after each of the last `count` tokens."""
    padded = np.pad(line, (0, LINE - line.size))
    return logits(model, [padded])[0, line.size - count : line.size].argmax(-1)


def test_answers_equal_those_of_plain_attention(model, contexts):
    """The questions have several lengths. The model answers two of them, and one is teacher-forced."""
    policy, pace = make_policy("full", model=model), Counted()
    cache = prefill(model, contexts, policy=policy, max_new_tokens=20)
    prompts = [np.arange(3, 3 + size, dtype=np.int32) for size in (1, 12, 2)]
    text = np.array([9, 8, 11, 30, 2], np.int32)
    questions = [
        Question(prompt, text, "", teacher_forced=given)
        for prompt, given in zip(prompts, (False, False, True), strict=True)
    ]
    records = {"pace": pace, "watch": Stopwatch()}
    with footprint_log() as log:
        for _ in range(2):  # the cache is returned unchanged
            answers, cache = answer(model, policy.compile(model), cache, questions, stop=(), **records)
    for row in (0, 1):
        tokens = answers[row].tokens
        line = np.concatenate([contexts[row], prompts[row], tokens[:-1]])
        np.testing.assert_array_equal(tokens, attention_tokens(model, line, 5))
    line = np.concatenate([contexts[2], prompts[2], text[:-1]])
    np.testing.assert_array_equal(answers[2].tokens, attention_tokens(model, line, 5))
    assert np.sum([call.tokens for call in log], 0).tolist() == [2 * 5, 2 * 16, 2 * 6]
    assert pace.tokens == 2 * 8 * 3  # all sequences ran two blocks of four steps
    assert pace.per_second > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "slides"),
    [
        ("quest", False),
        ("full", True),
        *(pytest.param(x, False, marks=pytest.mark.thorough) for x in ("full", "wgkv")),
    ],
)
def test_shrinking_the_batch_does_not_change_answers(model, contexts, policy, slides, monkeypatch):
    """The answers and the entries held at every step are the same."""
    model = sliding_model() if slides else model
    made = {
        "full": {},
        "wgkv": {"gates": tiny_gates(model), "tau": 0.5, "window": 4},
        "quest": {"ratio": 0.25},
    }
    policy = make_policy({policy: made[policy]}, model=model)
    cache = prefill(model, [*contexts, contexts[0][:9]], policy=policy, max_new_tokens=40, page_size=4)
    questions = [
        Question(np.array([5, 6], np.int32), np.zeros(count, np.int32), "") for count in (3, 33, 6, 33)
    ]
    take_rows, taken = answering._take_rows, []
    monkeypatch.setattr(
        answering,
        "_take_rows",
        lambda cache, last, rows: (taken.append(rows.tolist()), take_rows(cache, last, rows))[1],
    )

    def run():
        pace = Counted()
        records = {"pace": pace, "watch": Stopwatch()}
        with footprint_log() as log:
            copy = jax.tree.map(jnp.copy, cache)
            answers, restored = answer(model, policy.compile(model), copy, questions, stop=(), **records)
        assert jax.tree.map(jnp.shape, restored) == jax.tree.map(jnp.shape, cache)  # for further questions
        ran = np.array([call.tokens for call in log]) > 0
        held = np.where(ran, [call.held for call in log], 0)
        return [reply.tokens.tolist() for reply in answers], held, ran, pace.tokens

    answers, held, ran, counted = run()
    assert (taken, counted) == ([], 4 * 36)
    monkeypatch.setattr(answering, "SHRINK", 2)
    monkeypatch.setattr(answering, "SHRINK_STEPS", 20)
    again = run()
    assert taken == [[1, 3]]
    assert again[0] == answers
    np.testing.assert_array_equal(again[1], held)
    np.testing.assert_array_equal(again[2], ran)
    assert again[3] == 4 * 8  # only the steps of the whole batch count for the speed


def test_an_answer_ends_before_its_stop_token(model, contexts):
    policy = make_policy("full", model=model)
    cache = prefill(model, contexts, policy=policy, max_new_tokens=16)
    prompt = np.array([5, 6], np.int32)
    right = np.zeros(1, np.int32)
    questions = [Question(prompt, right, "", reserved=9, stops=stops) for stops in (False, True, True)]

    def run(stop):
        records = {"pace": Pace(), "watch": Stopwatch()}
        answers, _ = answer(
            model, policy.compile(model), jax.tree.map(jnp.copy, cache), questions, stop=stop, **records
        )
        return [reply.tokens for reply in answers]

    free = run(())
    stop = int(free[1][4])
    ended = run((stop,))
    np.testing.assert_array_equal(ended[0], free[0])
    for row in (1, 2):
        whole = free[row].tolist()
        assert ended[row].tolist() == (whole[: whole.index(stop)] if stop in whole else whole)
