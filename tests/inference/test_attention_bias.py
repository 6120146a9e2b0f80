"""Tests of a bias on entries, which is added to the logits of tokens that left the window, however a sequence is
cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.inference import prefill
from kvjax.inference.forward import forward
from kvjax.mesh import make_mesh, use_mesh
from tests.inference.cached import LENGTH, TOKENS, cached_logits
from tests.inference.delayed import delayed
from tests.inference.dense import dense_logits
from tests.tiny_models import tiny_model


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("window", "max_entries", "delay", "threshold"),
    [(1, None, 0, 0), (6, None, 2, 3), (6, 5, 5, 0)],
)
def test_any_division_into_calls_adds_the_bias_outside_the_window(window, max_entries, delay, threshold):
    model = tiny_model()
    rule = {
        "window": window,
        "max_entries": max_entries,
        "delay": delay,
        "threshold": threshold,
        "biased": True,
    }
    policy, plain = delayed(**rule), delayed(**rule | {"biased": False})
    want, _ = dense_logits(model, policy, TOKENS)
    assert np.abs(want - dense_logits(model, plain, TOKENS)[0]).max() > 0.01
    for calls in ([LENGTH], [8] * 4 + [1] * 8):
        got, cache = cached_logits(model, policy, TOKENS, calls, page_size=3)
        assert np.abs(got - want).max() < 1e-4
        assert "bias" in cache.pages.metadata


@pytest.mark.mesh
@pytest.mark.thorough
def test_a_mesh_gives_the_same_logits():
    model = tiny_model()
    rule = {"window": 6, "delay": 2, "threshold": 2, "biased": True}
    want, _ = dense_logits(model, delayed(**rule), TOKENS)
    with jax.set_mesh(make_mesh(fsdp=2, tensor=4)):
        split = tiny_model()
        got, _ = cached_logits(split, delayed(**rule), TOKENS, [LENGTH - 2, 1, 1])
    assert np.abs(got - want).max() < 1e-4


@pytest.mark.thorough
def test_stored_entries_keep_their_bias_under_a_policy_without_one():
    """A policy without a bias goes on over the cache: stored entries keep their bias, new ones have none."""
    model = tiny_model()
    biased, plain = (delayed(window=1, biased=biased) for biased in (True, False))
    cache = prefill(model, TOKENS[:, :30], policy=biased, max_new_tokens=8)
    with use_mesh(model):
        fed = jnp.asarray(TOKENS[:, 30:34]), jnp.array([4, 4])
        after, _, _ = jax.jit(forward)(model, plain.compile(model).read, cache, *fed)
    bias, length = np.asarray(after.pages.metadata["bias"]), np.asarray(after.layers.length)
    table = np.asarray(after.layers.page_table).clip(max=len(bias) - 1)
    rows = np.stack([bias[table[row]].reshape(-1)[: length[row]] for row in np.ndindex(length.shape)])
    assert rows.shape == (3 * 2 * 4, 34)
    assert (rows[:, 30:] == 0).all()
    assert (rows[:, :30] != 0).mean() > 0.99
