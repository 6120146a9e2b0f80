"""What is answered from a cache that was filled before the questions came."""

import numpy as np
import pytest

from kvjax.evaluate.measuring import Manner, measure
from kvjax.inference.sampling import logits
from kvjax.policies import make_policy
from kvjax.tasks import Question, Sample
from tests.tiny_models import tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def continuation(model, context, prompt, tokens):
    """Greedy tokens after context and prompt, by plain attention over a padded line."""
    line = np.concatenate([context, prompt])
    for _ in range(tokens):
        padded = np.pad(line, (0, 40 - line.size))
        line = np.append(line, logits(model, [padded])[0, line.size - 1].argmax())
    return line[-tokens:].astype(np.int32)


def test_answers_are_scored_against_what_the_model_says(model):
    """Half of the expected answers are what the full model would say; the others differ in one token."""
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(3):
        context = rng.integers(0, 61, 30).astype(np.int32)
        questions = []
        for kind, wrong in (("right", 0), ("wrong", 1)):
            prompt = rng.integers(0, 61, 3).astype(np.int32)
            answer = continuation(model, context, prompt, 2)
            answer[1] = (answer[1] + wrong) % 61
            questions.append(Question(prompt, answer, kind))
        samples.append(Sample(context, tuple(questions)))
    found = measure(model, make_policy("full"), samples, Manner(batch=2))
    assert found.by_kind == {"right": 1.0, "wrong": 0.0}
    assert (found.score, found.answers, found.kv_ratio) == (0.5, 6, 1.0)
    np.testing.assert_array_equal(found.rates, 1.0)
