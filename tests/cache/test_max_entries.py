"""Tests of head caches that keep their best entries: however a sequence is cut into calls, the result is the same as
comparing every token with every other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as caches
from kvjax.errors import UserError
from kvjax.inference import generate, prefill
from kvjax.inference.allocation import new_cache
from kvjax.mesh import make_mesh, use_mesh
from kvjax.policies import KNorm, Policy, Quest, Ratio, Schedule
from kvjax.policies.base import Keep
from kvjax.sampling_params import SamplingParams
from pallas_kernels.vertical_slash.api import FOREVER
from tests.cache.kept import lists, positions
from tests.inference.cached import LENGTH, cached_logits
from tests.inference.delayed import delayed
from tests.inference.dense import dense_logits, stored
from tests.tiny_models import tiny_model

TABLE = np.arange(12).reshape(3, 4)
"""A number for each layer and kv head, 0 among them."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "max_entries", "delay", "threshold", "sinks"),
    [
        (6, 7, 5, 2, 3),
        *(
            pytest.param(*x, marks=pytest.mark.thorough)
            for x in ((1, 5, 0, 0, 0), (6, 5, 0, 3, 0), (6, TABLE, 2, 0, 0), (6, None, 5, 3, 0))
        ),
    ],
)
def test_any_division_into_calls_keeps_and_sees_the_best_entries(
    model, tokens, window, max_entries, delay, threshold, sinks
):
    rule = dict(window=window, max_entries=max_entries, delay=delay, threshold=threshold, sinks=sinks)
    policy = delayed(**rule)
    want, kept = dense_logits(model, policy, tokens)
    for calls in ([LENGTH], [8] * 4 + [1] * 8, [1] * 8 + [8] * 4):
        got, cache = cached_logits(model, policy, tokens, calls, page_size=3)
        assert np.abs(got - want).max() < 1e-4
        np.testing.assert_array_equal(cache.layers.length, kept.sum(-1))
        if max_entries is not None:
            assert positions(cache) == lists(kept)
            assert all(row[:sinks] == list(range(sinks)) for row in positions(cache).values())


@pytest.mark.mesh
@pytest.mark.thorough
def test_batches_and_meshes_give_the_results_of_single_sequences(model, tokens):
    """Some sequences stop while others go on, before or after their head caches are full, and one is empty."""
    batch, lengths = np.concatenate([tokens, tokens]), np.array([LENGTH, 20, 3, 0])
    policy = delayed(window=6, max_entries=TABLE, delay=2)
    together, cache = cached_logits(model, policy, batch, [16] + [1] * 24, lengths=lengths)
    with jax.set_mesh(make_mesh(fsdp=2, tensor=4)):
        split = tiny_model()
        on_mesh, split_cache = cached_logits(split, policy, batch, [16] + [1] * 24, lengths=lengths)
    for row, length in enumerate(lengths[:3]):
        want, kept = dense_logits(model, policy, batch[row : row + 1, :length])
        for got in (together, on_mesh):
            assert np.abs(got[row, :length] - want[0]).max() < 1e-4
        for result in (cache, split_cache):
            np.testing.assert_array_equal(np.asarray(result.layers.length)[:, row], kept.sum(-1)[:, 0])
    np.testing.assert_array_equal(np.asarray(cache.layers.length)[:, 3], 0)


@functools.partial(jax.jit, static_argnames="window")
def ends_and_stored(priority, keep, window):
    end = caches.ends(keep.wanted(priority), priority, keep.max_entries, window=window)
    return end, stored(priority, keep, window)


def test_training_masks_the_entries_that_decoding_drops():
    """The mask that recipes pass to `vertical_slash` is checked for every query."""
    priority = jnp.asarray(np.random.default_rng(1).integers(0, 5, (2, 4, 50)), jnp.float32)
    for window in (1, 7):
        for max_entries in (None, 6, np.arange(4)):
            keep = Keep(jnp.float32(1), None if max_entries is None else jnp.asarray(max_entries))
            end, retained = jax.tree.map(np.asarray, ends_and_stored(priority, keep, window))
            retained, index = retained[:, :, :50], np.arange(50)
            near = index[:, None] - index < window
            seen = (index[:, None] < end[:, :, None]) & (index <= index[:, None])
            np.testing.assert_array_equal(seen, (retained | near) & (index <= index[:, None]))
    assert int(end.max()) == FOREVER


@pytest.mark.thorough
def test_the_default_pool_fits_max_entries_and_serves_questions(model, tokens, monkeypatch):
    monkeypatch.setattr(caches.sizes, "SMALL_POOL", 0)
    policy = delayed(window=6, max_entries=8, delay=5)
    prompt = [np.tile(tokens[0], 8)]
    cache = prefill(model, prompt, policy=policy, page_size=4, chunk=32)
    sizes = caches.stats(cache)
    assert sizes.entries.max() == 5 + 8
    assert sizes.pages == 12 * (2 + 2)
    assert sizes.pool_pages == sizes.pages
    assert set(sizes.metadata) == {"priority", "position"}
    assert sizes.bytes == sizes.pool_pages * 4 * (2 * 8 * 4 + 8)
    # a question and an answer leave the head caches as full as they were
    got = generate(
        model, [tokens[1, :4]], SamplingParams(max_new_tokens=9, ignore_eos=True), policy=policy, cache=cache
    )
    line = np.concatenate([prompt[0], tokens[1, :4]])
    want = generate(
        model, [line], SamplingParams(max_new_tokens=9, ignore_eos=True), policy=policy, page_size=4
    )
    np.testing.assert_array_equal(got.tokens[0], want.tokens[0])
    assert got.stats.entries.max() == 13
    assert got.stats.pool_pages == sizes.pool_pages
    np.testing.assert_array_equal(caches.stats(cache).entries, sizes.entries)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "later",
    [pytest.param({"max_entries": 4}, marks=pytest.mark.thorough), {"max_entries": 12, "threshold": 4}],
)
def test_a_stricter_policy_later_keeps_the_number_of_entries(model, tokens, later):
    """A head cache never loses an entry unless another takes its place, in one call or token by token."""
    cache = prefill(model, tokens[:1], policy=delayed(window=6, max_entries=12), page_size=4)
    policy, answers = delayed(window=6, **later), []
    for chunk in (16, 1):
        got = generate(
            model,
            [tokens[1, :12]],
            SamplingParams(max_new_tokens=6, ignore_eos=True),
            policy=policy,
            cache=cache,
            chunk=chunk,
        )
        assert (got.stats.entries == 5 + 12).all()
        answers.append(got.tokens[0])
    np.testing.assert_array_equal(*answers)


def test_max_entries_is_refused_with_eviction_or_selection(model, tokens):
    policy = delayed(window=6, max_entries=8)
    for part in ({"eviction": KNorm(), "schedule": Schedule(Ratio(0.5))}, {"selection": Quest(ratio=0.5)}):
        with pytest.raises(UserError, match="keeps its entries in no order"):
            Policy(policy.admission, window=6, **part)
    with use_mesh(model):
        cache = new_cache(model, policy.compile(model), [tokens[0]])
    with pytest.raises(UserError, match="made with max_entries, policy delayed has none"):
        generate(model, [[1]], cache=cache, policy=delayed(window=6))
