"""Held-out figures: the hard gates' are those of the cache that uses them, the soft ones' those of training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.command.launch import MeshShape
from kvjax.inference.forward import extend
from kvjax.inference.room import empty_cache
from kvjax.mesh import adopt, make_mesh
from kvjax.policies import make_policy
from kvjax.train.config import TrainConfig
from kvjax.train.objective import distillation
from kvjax.train.step import trained_method
from kvjax.train.validation import make_validate
from tests.tiny_models import tiny_gates, tiny_model

WINDOW, TAU = 5, 0.5


def sequences():
    """Three of 24 tokens and two of 40."""
    random = np.random.default_rng(5)
    return [random.integers(0, 61, length).astype(np.int32) for length in (24, 24, 24, 40, 40)]


@functools.cache
def validated(shape):
    """The model, its gates and what `validate` finds on a mesh."""
    config = TrainConfig(mesh=shape, window=WINDOW, tau=TAU)
    mesh = make_mesh(shape.data, shape.fsdp, shape.tensor)
    with jax.set_mesh(mesh):
        model = tiny_model()
        gates = tiny_gates(model)
        return config, mesh, model, gates, make_validate(config, mesh, sequences())(gates, model)


@pytest.fixture(scope="module")
def alone():
    return validated(MeshShape())


def test_hard_gates_lose_what_their_cache_loses(alone):
    """Each sequence prefilled into the paged cache, its final hidden states against full attention's."""
    _, mesh, model, gates, found = alone
    errors, rates = [], []
    with jax.set_mesh(mesh):
        policy = adopt(make_policy("wgkv", model=model, gates=gates, tau=TAU, window=WINDOW))
        run = jax.jit(extend)
        for tokens in sequences():
            cache = empty_cache(
                policy, batch=1, layers=3, kv_heads=4, head_dim=8, tokens=tokens.size, dtype=jnp.float32
            )
            batch = jnp.asarray(tokens)[None]
            cache, hidden = run(model, policy, cache, batch, jnp.array([tokens.size]))
            errors.append(float(jnp.square(hidden - model.hidden(batch)).mean()))
            left = tokens.size - (WINDOW - 1)
            rates.append(np.asarray(cache.layers.length)[:, 0] / left)
    assert found.hard_distillation == pytest.approx(np.mean(errors), rel=1e-4)
    assert found.hard_distillation > 1e-4
    # of all tokens, also those that are still in the ring
    np.testing.assert_allclose(found.rates, np.stack(rates), atol=4 / 24)
    assert 0.2 < found.rates.mean() < 0.8


def test_soft_gates_lose_what_training_says(alone):
    config, mesh, model, gates, found = alone
    errors, means = [], []
    with jax.set_mesh(mesh):
        method = trained_method(config, gates)
        for tokens in sequences():
            _, numbers = distillation(
                method, model, jnp.asarray(tokens)[None], window=WINDOW, weight=jnp.float32(1)
            )
            errors.append(float(numbers["distillation"]))
            means.append(float(numbers["gate"]))
    assert found.distillation == pytest.approx(np.mean(errors), rel=1e-5)
    assert found.gate == pytest.approx(np.mean(means), rel=1e-5)
    assert found.sequences == 5
    assert found.admitted == pytest.approx(found.rates.mean())
    assert found.admitted < found.kv_size < 1


@pytest.mark.parametrize("shape", [MeshShape(fsdp=8), MeshShape(fsdp=2, tensor=4)], ids=str)
def test_every_mesh_finds_the_same(alone, shape):
    (*_, mine), (*_, theirs) = validated(shape), alone
    np.testing.assert_allclose(mine.rates, theirs.rates, atol=1e-6)
    assert mine.numbers == pytest.approx(theirs.numbers, rel=1e-4)


def test_validation_hard_sizes_are_the_hard_students():
    config, mesh, model, gates, found = validated(MeshShape())
    own, soft = [], []
    with jax.set_mesh(mesh):
        for tokens in sequences():
            for hard, into in ((True, own), (False, soft)):
                method = trained_method(config, gates, hard=hard)
                _, numbers = distillation(
                    method, model, jnp.asarray(tokens)[None], window=WINDOW, weight=jnp.float32(1)
                )
                into.append([float(numbers[name]) for name in ("admitted", "kv_size")])
    assert [found.admitted, found.kv_size] == pytest.approx(np.mean(own, 0).tolist(), rel=1e-5)
    assert np.abs(np.mean(own, 0) - np.mean(soft, 0)).min() > 1e-3, (np.mean(own, 0), np.mean(soft, 0))
