"""Tests of contests: scores and footprints of several sampled answers to each problem, which are reproducible."""

import dataclasses
import math

import numpy as np
import pytest

from kvjax.evaluate.long_answers import SamplingSettings, measure_contest
from kvjax.evaluate.measuring import MeasureSettings
from kvjax.inference import generate
from kvjax.policies import make_policy
from kvjax.tasks.sample import Question, Sample
from tests.tiny_models import tiny_model, tiny_scorers

pytestmark = pytest.mark.slow

LENGTH, ENDS = 64, (5, 6)
DRAWING = SamplingSettings(3, temperature=1.5, top_p=0.95, top_k=20, seed=4)
SETTINGS = MeasureSettings(batch=6, page_size=4)


@pytest.fixture(scope="module")
def model():
    """Return a model that stops at two of its 61 tokens."""
    return tiny_model(eos_ids=ENDS)


def concluded(tokens):
    """Return an answer's last token as its conclusion, or None if that token is small."""
    return str(tokens[-1]) if len(tokens) and tokens[-1] > 30 else None


@pytest.fixture(scope="module")
def problems():
    """Return problems whose right answers end in an odd token."""
    rng = np.random.default_rng(3)
    return [
        Sample(
            rng.integers(7, 61, size),
            (
                Question(
                    np.zeros(0, np.int32), np.arange(1), f"problem {size}",
                    lambda tokens: float(concluded(tokens) is not None and tokens[-1] % 2),
                    LENGTH - 14, stops=True, concluded=concluded,
                ),
            ),
        )
        for size in (11, 14, 7, 12)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def full(model, problems):
    return measure_contest(model, make_policy("full", model=model), problems, DRAWING, SETTINGS)


def test_pass_at_1_is_the_mean_over_problems_and_draws(model, problems, full):
    """The score is computed from the answers, which equal those of `generate` with each answer's seed."""
    right, cut, without = np.zeros((4, 3)), 0, 0
    for index, problem in enumerate(problems):
        for draw in range(3):
            (tokens_of_answer,) = full.outputs[3 * index + draw]
            sampling = DRAWING.params(index, draw, LENGTH - 14)
            alone = generate(model, [problem.context], sampling, page_size=4, block=64)
            np.testing.assert_array_equal(tokens_of_answer, alone.tokens[0])
            if alone.finish_reasons == ["length"]:
                cut += 1
            elif concluded(tokens_of_answer) is None:
                without += 1
            else:
                right[index, draw] = tokens_of_answer[-1] % 2
    assert full.score == right.mean()
    assert 0 < full.score < 1
    assert full.by_kind == {
        f"problem {size}": own.mean() for size, own in zip((11, 14, 7, 12), right, strict=True)
    }
    assert full.answers == 12
    # the variance of each problem's mean is that of its draws (ddof 1) over their number
    error = math.sqrt((right.var(1, ddof=1) / 3).sum()) / 4
    assert full.drawn.error == pytest.approx(error)
    assert (full.drawn.draws, full.drawn.cut, full.drawn.without) == (3, cut / 12, without / 12)
    assert min(cut, without) > 0
    assert len({tuple(tokens_of_answer.tolist()) for (tokens_of_answer,) in full.outputs}) == 12


@pytest.mark.thorough
def test_draws_depend_on_the_seed_but_not_on_the_batch(model, problems, full):
    policy = make_policy("full", model=model)
    other = measure_contest(model, policy, problems, DRAWING, dataclasses.replace(SETTINGS, batch=5))
    for (one,), (same,) in zip(full.outputs, other.outputs, strict=True):
        np.testing.assert_array_equal(one, same)
    assert (other.score, other.footprint, other.drawn) == (full.score, full.footprint, full.drawn)
    np.testing.assert_array_equal(other.kv_ratios, full.kv_ratios)
    seeded = dataclasses.replace(DRAWING, seed=5)
    another = measure_contest(model, policy, problems, seeded, SETTINGS)
    assert all(
        len(one) != len(same) or (one != same).any()
        for (one,), (same,) in zip(full.outputs, another.outputs, strict=True)
    )


def test_one_draw_has_no_error(model, problems):
    drawing = dataclasses.replace(DRAWING, draws=1)
    found = measure_contest(model, make_policy("full", model=model), problems, drawing, SETTINGS)
    assert (found.answers, found.drawn.draws, found.drawn.error) == (4, 1, None)


def test_an_answer_that_is_cut_off_is_wrong(model, problems):
    """It is wrong even if the scorer calls it right."""
    always = [
        dataclasses.replace(
            problem, questions=(dataclasses.replace(problem.questions[0], scorer=lambda tokens: 1.0),)
        )
        for problem in problems
    ]
    found = measure_contest(model, make_policy("full", model=model), always, DRAWING, SETTINGS)
    assert found.score == pytest.approx(1 - found.drawn.cut)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [pytest.param("kvpop", marks=pytest.mark.thorough), "streaming_llm"])
def test_a_cache_of_constant_size_has_its_footprint(name, model, problems):
    """Each query step counts the stored entries: the sinks, the local window and the best between them, which
    are no more than the budget."""
    budget = 12
    policy = {
        "kvpop": lambda: make_policy(
            {"kvpop": {"scorers": tiny_scorers(model), "max_entries": budget, "sink": 2, "window": 6}},
            model=model,
        ),
        "streaming_llm": lambda: make_policy(
            {"streaming_llm": {"sink": 2, "window": budget - 2}}, model=model
        ),
    }[name]()
    found = measure_contest(model, policy, problems, DRAWING, SETTINGS)
    footprints, held, seen = [], 0, 0
    for index, (output,) in enumerate(found.outputs):
        prompt = len(problems[index // 3].context)
        # the token drawn last is not run, and a stop token is not in the output
        tokens = prompt + min(len(output), LENGTH - 14 - 1)
        # a prompt is read in one call, in which it attends to itself
        steps = prompt * (prompt + 1) / 2 + sum(min(n, budget - 1) + 1 for n in range(prompt, tokens))
        footprints.append(steps / (tokens * (tokens + 1) / 2))
        held, seen = held + min(tokens, budget - 1), seen + tokens
    assert found.footprint == pytest.approx(np.mean(footprints))
    assert found.footprint < 0.9
    assert found.kv_ratio == pytest.approx(held / seen)
    assert (
        found.bytes
        < 0.7 * measure_contest(model, make_policy("full", model=model), problems, DRAWING, SETTINGS).bytes
    )


def test_an_eviction_while_decoding_keeps_its_budget(model, problems):
    """The eviction runs at every eighth token of a sequence."""
    policy = make_policy("r_kv:entries=16,when=position,every=8,observed=4", model=model)
    found = measure_contest(model, policy, problems, DRAWING, SETTINGS)
    held, seen = 0, 0
    for index, (output,) in enumerate(found.outputs):
        prompt = len(problems[index // 3].context)
        tokens = prompt + min(len(output), LENGTH - 14 - 1)
        held, seen = held + (tokens if tokens < 24 else 16 + tokens % 8), seen + tokens
    assert found.kv_ratio == pytest.approx(held / seen)
    assert found.footprint < 0.95
