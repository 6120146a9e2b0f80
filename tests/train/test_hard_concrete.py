"""The hard-concrete distribution against its figures, which were worked out beside the code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.train.hard_concrete import probability_of_zero, sample

DRAWS = 1 << 20
FIGURES = {
    4.0: (0.0037, 0.9169, 0.9764),
    4.5: (0.0022, 0.9479, 0.9855),
    0.0: (0.1682, 0.1682, 0.5),
    -4.0: (0.9169, 0.0037, 0.0236),
}
"""Of a log α: P(z = 0), P(z = 1), the mean of z."""


@pytest.mark.parametrize("log_alpha", FIGURES)
def test_its_probabilities(log_alpha):
    z = np.asarray(sample(jax.random.key(0), jnp.full(DRAWS, log_alpha)))
    assert z.min() == 0
    assert z.max() == 1
    zero, one, mean = FIGURES[log_alpha]
    assert np.mean(z == 0) == pytest.approx(zero, abs=2e-3)
    assert np.mean(z == 1) == pytest.approx(one, abs=2e-3)
    assert z.mean(dtype=np.float64) == pytest.approx(mean, abs=2e-3)
    assert probability_of_zero(jnp.float32(log_alpha)) == pytest.approx(zero, abs=1e-4)


def test_a_mask_grows_with_its_log_alpha_and_has_no_gradient_where_it_is_clipped():
    log_alphas = jnp.linspace(-8, 8, 33)
    for seed in range(20):
        draw = lambda x, seed=seed: sample(jax.random.key(seed), x[None])[0]  # noqa: E731
        z, slope = jax.vmap(jax.value_and_grad(draw))(log_alphas)
        assert (jnp.diff(z) >= 0).all()
        inside = (z > 0) & (z < 1)
        np.testing.assert_array_equal(slope > 0, inside)
        assert inside.any()


def test_far_from_0_nothing_is_left_to_chance():
    for seed in range(20):
        z = sample(jax.random.key(seed), jnp.asarray([-30.0, 30.0]))
        np.testing.assert_array_equal(z, [0, 1])
