"""Tests of drawing tokens by row, against brute force in NumPy, and of frequencies against probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.inference.sampler import Counts, count_tokens, draw, log_probabilities, make_sampler
from kvjax.mesh import P, make_mesh, use_mesh
from kvjax.sampling_params import SamplingParams

VOCABULARY, BATCH = 16, 8


@pytest.fixture(scope="module")
def logits():
    return jnp.asarray(np.random.default_rng(0).normal(size=(BATCH, VOCABULARY)).astype(np.float32))


def sampler_of(params, **more):
    return make_sampler(params, range(len(params)), [3], VOCABULARY, **more)


def possible(row, sampling):
    """Return the token ids that may be drawn and their probabilities, by sorting in NumPy."""
    order = np.argsort(-row)
    scaled = row[order].astype(np.float64) / sampling.temperature
    kept = np.arange(VOCABULARY) < (sampling.top_k or VOCABULARY)
    p = np.where(kept, np.exp(scaled - scaled[0]), 0)
    p /= p.sum()
    kept &= (np.cumsum(p) - p < sampling.top_p) | (np.arange(VOCABULARY) == 0)
    kept &= np.exp(scaled - scaled[0]) >= sampling.min_p
    p = np.where(kept, p, 0)
    return order, p / p.sum()


def test_each_row_uses_its_own_parameters(logits):
    params = [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5, top_k=4),
        SamplingParams(temperature=1.5, top_p=0.6),
        SamplingParams(temperature=1.0, min_p=0.3),
        SamplingParams(temperature=2.0, top_k=6, top_p=0.7, min_p=0.1),
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(),
        SamplingParams(temperature=1.0, top_p=1e-38),
    ]
    with use_mesh():
        sampler = sampler_of(params)
        drawn = np.asarray(jax.jit(jax.vmap(lambda i: draw(sampler, logits, i)))(jnp.arange(4000)))
    for row, sampling in enumerate(params):
        frequency = np.bincount(drawn[:, row], minlength=VOCABULARY) / len(drawn)
        if sampling.temperature == 0:
            assert frequency[logits[row].argmax()] == 1
            continue
        order, p = possible(np.asarray(logits)[row], sampling)
        assert not frequency[order][p == 0].any()
        np.testing.assert_allclose(frequency[order], p, atol=0.03)


def test_draws_do_not_depend_on_the_batch(logits):
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(BATCH)]
    with use_mesh():
        run = jax.jit(draw)
        together = np.asarray(run(sampler_of(params), logits, 5))
        alone = [
            np.asarray(run(make_sampler([sampling], [row], [3], VOCABULARY), logits[row : row + 1], 5))[0]
            for row, sampling in enumerate(params)
        ]
    with jax.set_mesh(make_mesh(8)):
        split = np.asarray(jax.jit(draw)(sampler_of(params), jax.device_put(logits, P()), 5))
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_array_equal(together, split)


def test_penalties_and_bias_follow_their_formulas(logits):
    params = [
        SamplingParams(repetition_penalty=1.7),
        SamplingParams(presence_penalty=1.5),
        SamplingParams(frequency_penalty=0.8),
        SamplingParams(repetition_penalty=1.3, presence_penalty=-0.5, frequency_penalty=0.4),
        SamplingParams(logit_bias={2: 50.0}),
        SamplingParams(logit_bias={int(i): -100.0 for i in range(1, 14)}),
        SamplingParams(),
        SamplingParams(),
    ]
    prompts = [np.array([row, row + 1, 7]) for row in range(BATCH)]
    answers = np.random.default_rng(1).integers(0, VOCABULARY, (12, BATCH))
    with use_mesh():
        sampler = sampler_of(params)
        counts = count_tokens(sampler, prompts, VOCABULARY)
        with_token = jax.jit(Counts.with_token)
        for tokens in answers:
            counts = with_token(counts, tokens, np.arange(BATCH) != 6)
        chosen = np.asarray(jax.jit(draw)(sampler, logits, 0, counts))
    for row, sampling in enumerate(params):
        expected = np.asarray(logits)[row].astype(np.float64)
        drawn = answers[:, row] if row != 6 else answers[:0, row]
        times = np.bincount(drawn, minlength=VOCABULARY)
        occurred = (times > 0) | np.isin(np.arange(VOCABULARY), prompts[row])
        for token, bias in sampling.logit_bias.items():
            expected[token] += bias
        expected = np.where(
            occurred,
            np.where(
                expected > 0, expected / sampling.repetition_penalty, expected * sampling.repetition_penalty
            ),
            expected,
        )
        expected -= sampling.frequency_penalty * times + sampling.presence_penalty * (times > 0)
        assert chosen[row] == expected.argmax()


def test_log_probabilities_are_those_of_the_model(logits):
    params = [SamplingParams(temperature=2.0, top_k=2, logprobs=3), *[SamplingParams()] * (BATCH - 1)]
    with use_mesh():
        sampler = sampler_of(params)
        token = jnp.arange(BATCH, dtype=jnp.int32)
        found = jax.jit(log_probabilities)(sampler, logits, token)
        assert log_probabilities(sampler_of([SamplingParams()] * BATCH), logits, token) is None
    logits = np.asarray(logits)
    want = np.log(np.exp(logits) / np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(found.chosen, want[np.arange(BATCH), np.arange(BATCH)], atol=1e-6)
    np.testing.assert_array_equal(found.tokens, np.argsort(-want, -1)[:, :3])
    np.testing.assert_allclose(found.values, -np.sort(-want, -1)[:, :3], atol=1e-6)


def test_an_answer_ends_at_its_own_stop_tokens_and_length():
    params = [
        SamplingParams(max_new_tokens=9),
        SamplingParams(max_new_tokens=9, ignore_eos=True),
        SamplingParams(max_new_tokens=9, stop_token_ids=(5, 6)),
        SamplingParams(max_new_tokens=2),
    ]
    with use_mesh():
        sampler = sampler_of(params, rows=[0, 1, 2, 4], batch=5)
        ends = lambda token, made: np.asarray(sampler.ends(jnp.full(5, token), made)).tolist()  # noqa: E731
    assert ends(3, 1) == [True, False, True, True, True]
    assert ends(6, 1) == [False, False, True, True, False]
    assert ends(1, 2) == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -1}, "temperature must be a finite number, at least 0, got -1"),
        ({"n": 2}, "n=2 answers at temperature 0 would be alike"),
        ({"stop": "x"}, "stop must be a list of texts, got 'x'"),
        (
            {"logit_bias": {1: 1000}},
            "logit_bias of token 1 must be a finite number, at least -100 and at most 100",
        ),
        ({"max_tokens": 3}, "has no argument 'max_tokens'"),
    ],
)
def test_values_out_of_range_are_refused(wrong, message):
    with pytest.raises(UserError, match=message):
        SamplingParams(**wrong)


def test_token_ids_outside_the_vocabulary_are_refused():
    with (
        use_mesh(),
        pytest.raises(UserError, match="stop_token_ids has token id 16, the model"),
    ):
        sampler_of([SamplingParams(stop_token_ids=(16,))])
