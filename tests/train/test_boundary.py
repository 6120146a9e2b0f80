"""Test the score loss against a walk through the cache query by query, its signs, its weights, and its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from kvjax.train.boundary import boundary_loss, boundary_pairs
from tests.train.walked import loss_of_pairs, walk_pairs

T, SINK, WINDOW, K = 40, 3, 5, 6
RANDOM = np.random.default_rng(0)
SCORE, TARGET = (RANDOM.standard_normal((2, 2, T)).astype(np.float32) for _ in range(2))
COMPETES = np.broadcast_to(np.arange(T) >= SINK, (2, 2, T))


pairs_of = jax.jit(boundary_pairs, static_argnums=3)
losses = jax.jit(boundary_loss, static_argnames=("window", "temperature"))


@pytest.mark.parametrize("k", [0, 1, K, T])
@pytest.mark.parametrize("levels", [None, 3], ids=["distinct", "ties"])
def test_a_token_is_paired_with_the_one_that_it_would_displace(k, levels):
    target = TARGET if levels is None else np.floor(levels * TARGET) / levels
    pairs = pairs_of(target.astype(np.float32), COMPETES, np.int32(k), WINDOW)
    for row in np.ndindex(2, 2):
        expected = walk_pairs(target[row], k, WINDOW, SINK)
        valid = np.asarray(pairs.valid[row])
        assert set(np.flatnonzero(valid)) == set(expected)
        assert {u: int(pairs.boundary[row][u]) for u in expected} == expected


def loss_of(score, target):
    return losses(score, target, COMPETES, np.int32(K), window=WINDOW, temperature=0.7)


def test_the_loss_matches_the_paper():
    """It is the mean over the pairs of softplus(−y Δscore / τ), with y = ±1 by the target and min(1, |Δtarget|) as
    weight."""
    actual = jax.device_get(loss_of(SCORE, TARGET))
    for row in np.ndindex(2, 2):
        pairs = walk_pairs(TARGET[row], K, WINDOW, SINK)
        loss, agreement = loss_of_pairs(SCORE[row], TARGET[row], pairs, 0.7)
        np.testing.assert_allclose(actual["score_loss"][row], loss, rtol=1e-5)
        np.testing.assert_allclose(actual["agreement"][row], agreement, rtol=1e-6)
        assert actual["pairs"][row] == len(pairs) == T - WINDOW - SINK - K


def test_the_gradient_moves_scores_towards_the_targets_order():
    """For one pair, the token that should stay is pushed up and its boundary down, and the reverse."""
    competes = jnp.asarray(np.arange(5)[None, None] > 0)
    options = {"window": 2, "temperature": 1.0}

    @jax.jit
    @jax.value_and_grad
    def loss(score, target):
        return boundary_loss(score, target, competes, jnp.int32(1), **options)["score_loss"].sum()

    equal = np.zeros((1, 1, 5), np.float32)

    for value, sign in ((2.0, -1), (-2.0, 1)):
        # a cache of one entry holds token 1, and `value` decides if token 2 replaces it
        target = np.array([[[0.0, 1.0, value, 0.0, 0.0]]], np.float32)
        gradient = np.asarray(loss(equal, target)[1])[0, 0]
        assert np.sign(gradient[2]) == sign
        np.testing.assert_allclose(gradient.sum(), 0, atol=1e-7)
        np.testing.assert_array_equal(gradient[[0, 3, 4]], 0)
    assert float(loss(equal, equal)[0]) == 0


def test_infinite_scores_have_no_effect():
    """Priorities have them: above all others for sinks, and below them for the last tokens, which never leave."""
    score = SCORE.copy()
    score[..., :SINK], score[..., 1 - WINDOW :] = np.inf, -np.inf
    total = jax.jit(jax.value_and_grad(lambda x: loss_of(x, TARGET)["score_loss"].sum()))
    value, gradient = jax.device_get(total(score))
    np.testing.assert_allclose(value, total(SCORE)[0], rtol=1e-6)
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[..., :SINK], 0)
    # with equal targets, the last token is the boundary until the cache is full
    equal = jax.grad(lambda x: loss_of(x, np.full_like(TARGET, -30))["score_loss"].sum())(score)
    np.testing.assert_array_equal(equal, 0)


def test_gradients_match_finite_differences():
    with jax.enable_x64(True):
        check_grads(
            jax.jit(lambda x: loss_of(x, TARGET.astype(np.float64))["score_loss"]),
            (jnp.asarray(SCORE, jnp.float64),),
            order=1,
            modes=["rev"],
            atol=1e-6,
            rtol=1e-6,
        )


def test_a_sequence_that_never_fills_the_cache_has_no_loss():
    figures = losses(SCORE, TARGET, COMPETES, np.int32(T), window=WINDOW, temperature=0.7)
    assert (np.asarray(figures["score_loss"]) == 0).all()
    assert (np.asarray(figures["pairs"]) == 0).all()
