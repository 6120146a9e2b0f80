"""Questions and answers against plain attention over the whole line, the search for τ, and the built-in gates."""

import numpy as np
import pytest

import kvjax
from kvjax.command.stopwatch import Pace, Stopwatch
from kvjax.errors import UserError
from kvjax.evaluate import answering
from kvjax.evaluate.answering import answer
from kvjax.evaluate.gates import CLOSE, Calibration, nearest
from kvjax.evaluate.measuring import Manner, measure
from kvjax.inference.record import Calls
from kvjax.inference.sampling import logits, prefill
from kvjax.policies import make_policy
from kvjax.tasks import Question, Recall, Sample, builtin_task
from kvjax.tasks.sample import one_question, question_aware
from tests.tiny_models import tiny_gates, tiny_model

LINE = 40


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def contexts():
    return [np.random.default_rng(seed).integers(0, 61, 20).astype(np.int32) for seed in range(3)]


class Counted(Pace):
    """How many tokens were added."""

    tokens = 0

    def add(self, tokens, seconds, compiled):
        self.tokens += tokens
        super().add(tokens, seconds, compiled)


def said_by_attention(model, line, count):
    """The most likely next token after each of the last `count` tokens."""
    padded = np.pad(line, (0, LINE - line.size))
    return logits(model, [padded])[0, line.size - count : line.size].argmax(-1)


def test_answers_are_those_of_plain_attention(model, contexts):
    """Questions of several lengths at once: two that the model answers itself, one that is given a text."""
    policy, calls, pace = make_policy("full", model=model), Calls(), Counted()
    cache = prefill(model, contexts, policy=policy, max_new_tokens=20)
    prompts = [np.arange(3, 3 + size, dtype=np.int32) for size in (1, 12, 2)]
    text = np.array([9, 8, 11, 30, 2], np.int32)
    questions = [
        Question(prompt, text, "", given=given)
        for prompt, given in zip(prompts, (False, False, True), strict=True)
    ]
    for _ in range(2):  # the cache stays as it is
        said = answer(model, policy, cache, questions, stop=(), calls=calls, pace=pace, watch=Stopwatch())
    for row in (0, 1):
        tokens = said[row].tokens
        line = np.concatenate([contexts[row], prompts[row], tokens[:-1]])
        np.testing.assert_array_equal(tokens, said_by_attention(model, line, 5))
    line = np.concatenate([contexts[2], prompts[2], text[:-1]])
    np.testing.assert_array_equal(said[2].tokens, said_by_attention(model, line, 5))
    assert np.sum(calls.tokens, 0).tolist() == [2 * 5, 2 * 16, 2 * 6]
    assert pace.tokens == 2 * 8 * 3  # two blocks of four steps, all rows
    assert pace.per_second > 0


@pytest.mark.parametrize("policy", ["full", "wgkv", "quest"])
def test_rows_that_still_run_go_on_as_a_smaller_batch(model, contexts, policy, monkeypatch):
    """The same is said, and the same was held at every step."""
    made = {
        "full": {},
        "wgkv": {"gates": tiny_gates(model), "tau": 0.5, "window": 4},
        "quest": {"ratio": 0.25},
    }
    policy = make_policy(policy, model=model, **made[policy])
    cache = prefill(model, contexts, policy=policy, max_new_tokens=40, page_size=4)
    questions = [Question(np.array([5, 6], np.int32), np.zeros(count, np.int32), "") for count in (3, 33, 6)]
    take_rows, taken = answering._take_rows, []
    monkeypatch.setattr(
        answering,
        "_take_rows",
        lambda cache, last, rows: (taken.append(rows.tolist()), take_rows(cache, last, rows))[1],
    )

    def run():
        calls, pace = Calls(), Counted()
        said = answer(model, policy, cache, questions, stop=(), calls=calls, pace=pace, watch=Stopwatch())
        ran = np.array(calls.tokens) > 0
        return [one.tokens.tolist() for one in said], np.where(ran, calls.held, 0), ran, pace.tokens

    said, held, ran, counted = run()
    assert (taken, counted) == ([], 3 * 36)
    monkeypatch.setattr(answering, "FEWER", 3)
    monkeypatch.setattr(answering, "AHEAD", 20)
    again = run()
    assert taken == [[1]]
    assert again[0] == said
    np.testing.assert_array_equal(again[1], held)
    np.testing.assert_array_equal(again[2], ran)
    assert again[3] == 3 * 8  # a speed is that of the whole batch


def test_an_answer_ends_before_its_stop_token(model, contexts):
    policy = make_policy("full", model=model)
    cache = prefill(model, contexts, policy=policy, max_new_tokens=16)
    prompt = np.array([5, 6], np.int32)
    right = np.zeros(1, np.int32)
    questions = [Question(prompt, right, "", reserved=9, stops=stops) for stops in (False, True, True)]

    def run(stop):
        records = {"calls": Calls(), "pace": Pace(), "watch": Stopwatch()}
        said = answer(model, policy, cache, questions, stop=stop, **records)
        return [one.tokens for one in said]

    free = run(())
    stop = int(free[1][4])
    ended = run((stop,))
    np.testing.assert_array_equal(ended[0], free[0])
    for row in (1, 2):
        whole = free[row].tolist()
        assert ended[row].tolist() == (whole[: whole.index(stop)] if stop in whole else whole)


def test_a_question_joins_its_context_but_for_the_token_that_is_asked():
    def question(*ids):
        return Question(np.array(ids, np.int32), np.array([9], np.int32), "")

    sample = Sample(np.array([1, 2], np.int32), (question(3, 4, 5), question(6)))
    one, other = question_aware([sample])
    assert one.context.tolist() == [1, 2, 3, 4]
    assert [q.prompt.tolist() for q in one.questions] == [[5]]
    assert other.context.tolist() == [1, 2]
    assert [q.prompt.tolist() for q in other.questions] == [[6]]


def test_tau_meets_the_wanted_size(model):
    gates = np.random.default_rng(0).beta(0.05, 0.3, 20_000)
    policy = make_policy("wgkv", model=model, gates=tiny_gates(model), window=4)
    tried = []

    def size_of(policy):
        tau = float(np.asarray(policy.admission.tau)[0])
        tried.append(tau)
        return float(0.02 + 0.98 * (gates >= tau).mean())

    search = Calibration(policy, size_of)
    for ratio in (0.4, 0.05, 0.8, 0.06):
        found = float(np.asarray(search.to(ratio).admission.tau)[0])
        assert 0.02 + 0.98 * (gates >= found).mean() == pytest.approx(ratio, rel=1.1 * CLOSE)
    assert len(tried) == len(set(tried)) < 30
    with pytest.raises(UserError, match="wgkv keeps at least 0.02. of the entries, got a budget of 0.01"):
        search.to(0.01)


def test_of_several_gates_the_two_nearest_that_can_keep_so_much_are_tried(model):
    policy = make_policy("wgkv", model=model, gates=tiny_gates(model), window=4)

    def search(least, own):
        """Gates that keep `own` below a τ of .5, and `least` above it."""
        return Calibration(policy, lambda p: own if float(np.asarray(p.admission.tau)[0]) < 0.5 else least)

    searches = {"large": search(0.3, 0.35), "small": search(0.1, 0.9), "none": search(0.0, 0.0)}
    assert list(nearest(searches, 0.35)) == ["large", "small"]
    # the large ones are nearer, but keep too much at any τ
    found = nearest(searches, 0.1)
    assert list(found) == ["small", "none"]
    assert float(np.asarray(found["small"].admission.tau)[0]) > 0.5
    with pytest.raises(UserError, match=r"wgkv keeps at least 0\.300"):
        nearest({"large": searches["large"]}, 0.1)
    # a size that jumps past what is wanted: the nearest
    assert float(np.asarray(search(0.3, 0.9).to(0.7).admission.tau)[0]) < 0.5
    assert float(np.asarray(search(0.3, 0.9).to(0.4).admission.tau)[0]) > 0.5


def test_the_built_in_gates_keep_what_is_asked_for():
    model = kvjax.load_model("builtin")
    task = builtin_task(Recall)
    policy = make_policy("wgkv", model=model, gates="builtin")
    found = measure(model, policy, [task.sample(50 + seed, 512) for seed in range(4)], Manner())
    assert found.answers == 64
    assert found.score > 0.9
    assert found.kv_ratio < 0.2


def test_each_context_asks_another_question():
    ids = np.array([1], np.int32)
    both = Sample(ids, (Question(ids, ids, "a"), Question(ids, ids, "b")))
    assert [sample.questions[0].kind for sample in one_question([both] * 3)] == ["a", "b", "a"]
