"""Test the hard-concrete distribution against figures that were computed separately."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.train.hard_concrete import probability_of_zero, sample

SAMPLES = 1 << 20
FIGURES = {
    4.0: (0.0037, 0.9169, 0.9764),
    4.5: (0.0022, 0.9479, 0.9855),
    0.0: (0.1682, 0.1682, 0.5),
    -4.0: (0.9169, 0.0037, 0.0236),
}
"""For each log α: P(z = 0), P(z = 1) and the mean of z."""


sample_masks = jax.jit(sample)


@pytest.mark.parametrize("log_alpha", FIGURES)
def test_probabilities_match_figures_computed_separately(log_alpha):
    z = np.asarray(sample_masks(jax.random.key(0), np.full(SAMPLES, log_alpha, np.float32)))
    assert z.min() == 0
    assert z.max() == 1
    p_zero, p_one, mean = FIGURES[log_alpha]
    assert np.mean(z == 0) == pytest.approx(p_zero, abs=2e-3)
    assert np.mean(z == 1) == pytest.approx(p_one, abs=2e-3)
    assert z.mean(dtype=np.float64) == pytest.approx(mean, abs=2e-3)
    assert probability_of_zero(jnp.float32(log_alpha)) == pytest.approx(p_zero, abs=1e-4)


def test_a_mask_grows_with_its_log_alpha_and_has_no_gradient_where_it_is_clipped():
    log_alphas = np.linspace(-8, 8, 33, dtype=np.float32)
    draw = jax.value_and_grad(lambda x, key: sample(key, x[None])[0])
    masks = jax.jit(jax.vmap(draw, in_axes=(0, None)))
    for seed in range(20):
        z, slope = jax.device_get(masks(log_alphas, jax.random.key(seed)))
        assert (np.diff(z) >= 0).all()
        inside = (z > 0) & (z < 1)
        np.testing.assert_array_equal(slope > 0, inside)
        assert inside.any()


def test_masks_of_extreme_log_alphas_are_certain():
    for seed in range(20):
        z = sample_masks(jax.random.key(seed), np.float32([-30.0, 30.0]))
        np.testing.assert_array_equal(z, [0, 1])
