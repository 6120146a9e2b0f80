"""Tests that head patterns score expected answers as the cache does, with one program for all patterns."""

import jax
import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.evaluate.teacher_forcing import TeacherForcing
from kvjax.mesh import make_mesh
from kvjax.policies import make_policy
from kvjax.tasks import Question, Sample
from kvjax.tasks.text import continuation
from tests.inference.cached import cached_logits
from tests.tiny_models import tiny_model

PATTERNS = ((0.3, 2, 5), (1.0, 0, 1), (0.0, 30, 3))
"""The share of whole heads, the sinks and the window of each pattern."""


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def drawn_samples(*sizes):
    """Return samples with contexts, questions and answers of the given sizes. A score is the share of right tokens."""
    random = np.random.default_rng(0)

    def tokens(count):
        return random.integers(0, 61, count).astype(np.int32)

    def question(prompt, answer):
        right = tokens(answer)
        return Question(tokens(prompt), right, "", lambda output: float((output == right).mean()))

    return [Sample(tokens(n), tuple(question(*size) for size in questions)) for n, questions in sizes]


@pytest.fixture(scope="module")
def samples():
    return drawn_samples((23, ((3, 1), (6, 4))), (20, ((4, 7), (2, 2), (1, 3))))


def patterns():
    weights = np.random.default_rng(1).permutation(12).reshape(3, 4) / 12
    for share, sink, window in PATTERNS:
        yield weights < share, sink, window


def through_the_cache(model, samples, whole, sink, window):
    arguments = {"pattern": whole.astype(float), "sink": sink, "window": window}
    policy = make_policy({"head_pattern": arguments}, model=model)
    losses, scores = [], []
    for sample in samples:
        for question in sample.questions:
            line = np.concatenate([sample.context, question.prompt, question.answer])
            padded = np.pad(line, (0, 40 - len(line)))[None]
            logits, _ = cached_logits(model, policy, padded, [40], lengths=np.array([len(line)]))
            logits = logits[0, len(line) - len(question.answer) - 1 : len(line) - 1].astype(np.float64)
            total = np.log(np.exp(logits).sum(-1))
            losses.append(total - logits[np.arange(len(logits)), question.answer])
            scores.append(question.score(logits.argmax(-1)))
    return np.mean(scores), np.concatenate(losses).mean()


@pytest.mark.slow
def test_every_pattern_equals_the_policy(model, samples):
    run = TeacherForcing(model, samples)
    for pattern in patterns():
        outcome = run(*pattern)
        assert (outcome.score, outcome.loss) == pytest.approx(
            through_the_cache(model, samples, *pattern), abs=1e-5
        )


@pytest.mark.mesh
def test_patterns_share_one_program_also_on_a_mesh(model, samples):
    compiled = []

    def count(event, duration, **_):
        compiled.append(event == "/jax/core/compile/backend_compile_duration")

    run = TeacherForcing(model, samples)
    run(np.ones((3, 4), bool), 1, 1)
    jax.monitoring.register_event_duration_secs_listener(count)
    alone = [run(*pattern) for pattern in patterns()]
    assert not any(compiled)
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
        split = TeacherForcing(tiny_model(), samples)
        for pattern, outcome in zip(patterns(), alone, strict=True):
            assert split(*pattern).loss == pytest.approx(outcome.loss, abs=1e-5)
    one_by_one = TeacherForcing(model, samples, 1)
    for pattern, outcome in zip(patterns(), alone, strict=True):
        found = one_by_one(*pattern)
        assert found.score == outcome.score
        assert found.loss == pytest.approx(outcome.loss, abs=1e-5)


def test_likelihoods_that_are_not_finite_are_refused(samples):
    model = tiny_model(tied=False)
    forced = TeacherForcing(model, samples)
    model.layers.down[...] = model.layers.down[...] * np.nan
    with pytest.raises(UserError, match="not finite"):
        forced(np.ones((3, 4), bool), 1, 1)


@pytest.mark.slow
def test_teacher_forced_text_is_scored_by_agreement_with_whole_heads(model, samples):
    """The score is agreement with the full cache, as in an evaluation, whatever the true text is."""
    text = np.concatenate([sample.context for sample in samples])
    given = continuation(text)
    run, everything = TeacherForcing(model, [given]), np.ones((3, 4), bool)
    assert run(everything, 0, 1).score == 1
    (question,) = given.questions
    line = np.concatenate([given.context, question.prompt, question.answer])[None]
    predicted = {}
    for name, whole in (("full", everything), ("streaming", ~everything)):
        policy = make_policy(
            {"head_pattern": {"pattern": whole.astype(float), "sink": 1, "window": 3}}, model=model
        )
        logits, _ = cached_logits(model, policy, line, [line.shape[1]], lengths=np.array([line.shape[1]]))
        predicted[name] = logits[0, -len(question.answer) - 1 : -1].argmax(-1)
    assert run(~everything, 1, 3).score == pytest.approx((predicted["full"] == predicted["streaming"]).mean())
