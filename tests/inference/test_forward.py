"""Tests of prefill, chunks and decode against dense attention under the same visibility rule, and of tokens that are
not written to the cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as caches
from kvjax.inference import prefill
from kvjax.inference.forward import MEMORIES, forward
from kvjax.mesh import make_mesh, use_mesh
from kvjax.policies import make_policy
from tests.inference.cached import LENGTH, cached_logits
from tests.inference.delayed import delayed
from tests.inference.dense import dense_logits
from tests.tiny_models import policies_for, tiny_model

run = jax.jit(forward, static_argnames=("write", "capture"))


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def policies(model):
    capped = delayed(window=6, max_entries=5, delay=2)
    evicting = {name: make_policy({name: {"ratio": 0.5}}, model=model) for name in ("h2o", "snapkv")}
    return policies_for(model, 6) | {"max_entries": capped} | evicting


@pytest.mark.parametrize(
    ("name", "window"),
    [
        pytest.param("full", 1, marks=pytest.mark.thorough),
        pytest.param("full", 6, marks=pytest.mark.thorough),
        pytest.param("streaming_llm", 6, marks=pytest.mark.thorough),
        pytest.param("head_pattern", 6, marks=pytest.mark.thorough),
        pytest.param("wgkv", 1, marks=pytest.mark.thorough),
        ("wgkv", 6),
    ],
)
def test_prefill_chunks_and_decode_see_the_window_and_retained_tokens(model, tokens, name, window):
    policy = policies_for(model, window)[name]
    want, kept = dense_logits(model, policy, tokens)
    once, cache = cached_logits(model, policy, tokens, [LENGTH])
    assert np.abs(once - want).max() < 1e-4
    left = kept.sum(-1)
    np.testing.assert_array_equal(np.asarray(cache.layers.length), left)
    mixed, cache = cached_logits(model, policy, tokens, [8] * 4 + [1] * 8, page_size=3)
    assert np.abs(mixed - want).max() < 1e-4
    np.testing.assert_array_equal(np.asarray(cache.layers.length), left)


def test_batches_and_padding_do_not_change_a_sequence(model, tokens):
    """Lengths are below, equal to and above the window, and one row is empty."""
    policy = policies_for(model, 6)["wgkv"]
    batch, lengths = np.concatenate([tokens, tokens]), np.array([LENGTH, 6, 3, 0])
    padded = batch.copy()
    padded[np.arange(LENGTH) >= lengths[:, None]] = 60
    together, cache = cached_logits(model, policy, padded, [20, 20], lengths=lengths)
    for row in (1, 2):
        length = lengths[row]
        alone, own = cached_logits(
            model, policy, batch[row : row + 1, :6], [6], lengths=lengths[row : row + 1]
        )
        assert np.abs(together[row, :length] - alone[0, :length]).max() < 1e-4
        np.testing.assert_array_equal(cache.layers.length[:, row], own.layers.length[:, 0])
    np.testing.assert_array_equal(cache.layers.length[:, 3], 0)
    sizes = caches.stats(cache)
    layers_and_heads, page = 3 * 4, 4
    rings = layers_and_heads * np.ceil(np.minimum(lengths, 5) / page).sum()
    assert sizes.pages == rings + np.ceil(np.asarray(cache.layers.length) / page).sum()
    np.testing.assert_array_equal(sizes.entries[0, :, 0] >= np.minimum(lengths, 5), True)


@pytest.mark.mesh
@pytest.mark.thorough
def test_a_mesh_gives_the_same(model, tokens):
    batch = np.concatenate([tokens, tokens[:, ::-1]])
    policy = policies_for(model, 6)["wgkv"]
    want, alone = cached_logits(model, policy, batch, [LENGTH - 2, 1, 1])
    with jax.set_mesh(make_mesh(fsdp=2, tensor=4)):
        split = tiny_model()
        got, cache = cached_logits(split, policies_for(split, 6)["wgkv"], batch, [LENGTH - 2, 1, 1])
    assert np.abs(got - want).max() < 1e-4
    np.testing.assert_array_equal(cache.layers.length, alone.layers.length)
    assert caches.stats(cache).pages == caches.stats(alone).pages


@pytest.mark.parametrize(
    "name",
    [
        "max_entries",
        *(pytest.param(x, marks=pytest.mark.thorough) for x in ("h2o", "wgkv", "quest", "snapkv")),
    ],
)
@pytest.mark.parametrize("count", [7, pytest.param(1, marks=pytest.mark.thorough)])
def test_unwritten_tokens_see_the_same_and_change_nothing(model, tokens, name, count):
    policy = policies(model)[name]
    cache = prefill(model, tokens[:, :20], policy=policy, max_new_tokens=10, page_size=4)
    before = jax.device_get(cache)
    with use_mesh(model):
        compiled = policy.compile(model)
        view = compiled.read if policy.selection is None else compiled.decode
        fed = jnp.asarray(tokens[:, 20 : 20 + count]), jnp.array([count, count - 1])
        written, hidden, captured = run(model, view, cache, *fed, capture=MEMORIES)
        same, read, seen = run(model, view, cache, *fed, write=False, capture=MEMORIES)
    np.testing.assert_allclose(read[0], hidden[0], atol=1e-6)
    np.testing.assert_allclose(read[1, : count - 1], hidden[1, : count - 1], atol=1e-6)
    for mine, theirs in zip(*map(jax.tree.leaves, (same, before)), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(written.seen - same.seen, [count, count - 1])
    after = captured, seen, {"state": written.layers.state, "observations": written.observations}
    for one, other, third in zip(*map(jax.tree.leaves, after), strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(one, third)
