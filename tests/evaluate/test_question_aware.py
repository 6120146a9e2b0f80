"""Compressed with the question in sight: what untrained methods then keep, on the built-in model."""

import pytest

from kvjax.evaluate.measuring import Manner, measure, measure_together
from kvjax.models import load_model
from kvjax.policies import make_policy
from kvjax.tasks import Needle, Recall, builtin_task
from kvjax.tasks.sample import one_question, question_aware

CONTEXT, RATIO = 512, 0.2
MANNER = Manner(chunk=128, length=576, capacity=1152)


@pytest.fixture(scope="module")
def model():
    return load_model("builtin")


@pytest.fixture(scope="module", params=[Needle, Recall], ids=lambda kind: kind.name)
def samples(request):
    """Twelve, each with one of its questions, at any depth."""
    task = builtin_task(request.param)
    return question_aware(one_question([task.sample(70 + seed, CONTEXT) for seed in range(12)]))


def test_what_the_question_looks_at_is_kept(model, samples):
    """Every method that looks at queries keeps at a fifth what the question asks for."""
    together = [
        [make_policy("full", model=model)],
        [make_policy("snapkv", model=model, ratio=RATIO, observed=8)],
        [make_policy("adakv", model=model, ratio=RATIO, observed=8)],
        [make_policy("tova", model=model, ratio=RATIO)],
        [make_policy("r_kv", model=model, ratio=RATIO)],
    ]
    full, *found = measure_together(model, together, samples, MANNER)
    found.append(measure(model, make_policy("h2o", model=model, ratio=RATIO), samples, MANNER))
    assert full.score == 1
    assert all(one.kv_ratio == pytest.approx(RATIO, abs=0.01) for one in found)
    assert [one.score for one in found if one.score < 0.9] == []


def test_a_chunk_looked_at_by_the_question_keeps_far_more_than_by_itself(model, samples):
    """PyramidKV after every chunk: patched with the question's tokens, and naive (KV footprint, section 4)."""

    def score(observers):
        chunks = {"when": "chunk", "chunk": 128, "observers": observers}
        policy = make_policy("pyramidkv", model=model, ratio=RATIO, observed=8, **chunks)
        return measure(model, policy, samples, MANNER).score

    patched, naive = score("prompt"), score("own")
    assert patched >= 0.9
    assert patched > naive + 0.5
