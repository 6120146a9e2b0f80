"""Test the scorer: its size, its features, invariances of its scores, the tokens that a score depends on, and its
gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.errors import UserError
from kvjax.mesh import use_mesh
from kvjax.policies.admission.kvpop import Scorer, Sizes
from pallas_kernels.mlstm import mlstm
from tests.policies.admission.admitted import layer
from tests.tiny_models import tiny_model, tiny_scorers

B, K, T, H = 2, 4, 40, 8
RANDOM = np.random.default_rng(0)
KEYS, VALUES = (jnp.asarray(RANDOM.standard_normal((B, K, T, H)), jnp.float32) for _ in range(2))


@functools.cache
def scorer(**forms) -> Scorer:
    return layer(tiny_scorers(tiny_model(), **forms), 1)


streams_of = jax.jit(lambda scorer, keys, values: scorer.streams(keys, values))


@jax.jit
def scores(scorer, keys, values, delay=0):
    """Return the scores as a whole sequence computes them: the query at t + delay reads token t's score."""
    streams = scorer.streams(keys, values)
    queries = jnp.roll(streams.q, delay, 2)
    return scorer.score(queries, streams)[0]


def test_a_head_has_as_many_parameters_as_the_paper_says():
    """With head_dim 128 a head has three matrices 256 × 64, two gates of 256, a head of 64, three numbers and the
    decay. Qwen3-4B has 14.3 million in all (Table 2)."""
    with use_mesh():
        made = jax.eval_shape(Sizes(36, 8, 128).make)
    count = sum(x.size for x in jax.tree.leaves(nnx.state(made)))
    assert count == 36 * 8 * (3 * 256 * 64 + 2 * 256 + 64 + 3 + 1)
    assert round(count / 1e6, 1) == 14.3


def test_new_gates_forget_little_and_are_equal_for_all_tokens():
    with use_mesh():
        first = layer(jax.jit(lambda: Sizes(3, K, H).make(0))(), 1)
    streams = streams_of(first, KEYS, VALUES)
    np.testing.assert_array_equal(streams.log_i, 0)
    bias = np.linspace(3.0, 6.0, 4)
    expected, capped = (-np.log1p(np.exp(-x))[:, None] for x in (bias, 15 * np.tanh(bias / 15)))
    np.testing.assert_allclose(streams.log_f, np.broadcast_to(capped, (B, K, T)), rtol=1e-5)
    assert np.abs(expected - capped).max() < 0.02
    np.testing.assert_allclose(np.asarray(first.a).std(), 0.5, rtol=0.3)


def test_features_are_two_distributions():
    """Therefore products of queries and keys are in (0, 2], and the result of a read is a weighted mean."""
    streams = jax.device_get(streams_of(scorer(), KEYS, VALUES))
    for x in (streams.q, streams.k):
        assert float(x.min()) > 0
        halves = np.asarray(x).reshape(B, K, T, 2, -1).sum(-1)
        np.testing.assert_allclose(halves, 1, rtol=1e-5)
    products = np.einsum("bktd,bkjd->bktj", streams.q, streams.k)
    assert 0 < float(products.min()) <= float(products.max()) <= 2 + 1e-5


def test_gates_are_capped():
    open_wide = jax.tree.map(lambda x: x, scorer())
    open_wide.w_i[...] = np.asarray(open_wide.w_i[...]) * 1000
    assert 14.9 < np.abs(streams_of(open_wide, KEYS, VALUES).log_i).max() <= 15
    free = scorer(capped=False)
    assert np.abs(streams_of(free, KEYS, 1000 * np.asarray(VALUES)).log_i).max() > 15


def test_a_common_factor_of_weights_cancels_with_the_plain_normaliser():
    """With the plain normaliser, a factor that all tokens' input gates share cancels. With xLSTM's it does not."""
    for normaliser, same in (("plain", True), ("xlstm", False)):
        one = scorer(normaliser=normaliser, capped=False)
        other = jax.tree.map(lambda x: x, one)
        other.b_i[...] = np.asarray(other.b_i[...]) + 2.5
        difference = np.abs(np.subtract(*(scores(x, KEYS, VALUES) for x in (one, other)))).max()
        assert (difference < 1e-4) == same


def test_results_lie_between_the_values():
    with use_mesh():
        made = layer(jax.jit(lambda: Sizes(3, K, H).make(0))(), 1)
    streams = streams_of(made, KEYS, VALUES)
    h, v = np.asarray(jax.jit(mlstm)(*streams)[0]), np.asarray(streams.v)
    so_far = np.minimum.accumulate(v, 2) - 1e-4, np.maximum.accumulate(v, 2) + 1e-4
    assert ((so_far[0] <= h) & (h <= so_far[1])).all()


@pytest.mark.parametrize("delay", [0, 5])
def test_a_score_depends_on_tokens_up_to_its_delay(delay):
    """The score of token u depends on the tokens up to u + delay, and on no later ones."""
    at = 17
    changed = [x + np.float32(np.arange(T) == at)[:, None] for x in (np.asarray(KEYS), np.asarray(VALUES))]
    difference = np.subtract(*(scores(scorer(), *x, delay) for x in ((KEYS, VALUES), changed)))
    difference = np.abs(difference).max((0, 1))
    token = np.arange(T) - delay  # the token that each score belongs to
    assert (difference[token < at - delay] == 0).all()
    assert difference[token == at - delay] > 1e-6


def test_parameters_have_gradients_and_keys_and_values_have_none():
    def total(scorer, keys, values):
        return jnp.square(scores(scorer, keys, values)).sum()

    with use_mesh():
        own, *given = jax.jit(jax.grad(total, (0, 1, 2)))(scorer(), KEYS, VALUES)
    for x in given:
        np.testing.assert_array_equal(x, 0)
    missing = {
        str(path[-1]) for path, x in nnx.to_flat_state(nnx.state(own)) if not np.abs(x.get_value()).max() > 0
    }
    assert missing == {"theta"}, "which only counts between positions"


def test_the_decay_is_learnt_between_its_limits():
    one, log_gamma = jax.tree.map(lambda x: x, scorer()), jax.jit(lambda scorer: scorer.log_gamma())
    for theta, gamma in ((-50.0, 0.999), (50.0, 0.999999), (0.0, (0.999 * 0.999999) ** 0.5)):
        one.theta[...] = np.full_like(one.theta[...], theta)
        np.testing.assert_allclose(np.exp(log_gamma(one)), gamma, rtol=1e-6)


def test_invalid_forms_are_refused():
    with use_mesh():
        with pytest.raises(UserError, match="features is one of hedgehog, none, got 'softmax'"):
            Sizes(1, 1, 8, features="softmax").make()
        with pytest.raises(UserError, match="'none' may be negative, so normaliser must be 'xlstm'"):
            Sizes(1, 1, 8, features="none").make()
        assert Sizes(1, 1, 8, features="none", normaliser="xlstm").make().widths == (8, 4)
