"""Tests of questions over a compacted cache: they have several tokens, come in padded batches, and each layer and head
kept another number of entries."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as caches
from kvjax.inference import prefill
from kvjax.inference.attention import cached_attention
from kvjax.mesh import use_mesh
from kvjax.models.decoder import scan_layers
from kvjax.policies import make_policy
from tests.policies.published import softmax

QUESTIONS = 7, 3


@pytest.fixture(scope="module")
def policy(model):
    return make_policy("snapkv:observed=6,ratio=0.4,pyramidkv.beta=2,adakv", model=model)


@pytest.fixture(scope="module")
def cache(model, policy, prompts):
    return prefill(model, prompts, policy=policy, max_new_tokens=max(QUESTIONS), page_size=4)


def entries(cache, layer, b, head):
    """Return a head cache's keys and values [s h] in order, in float64."""
    length, size = int(cache.layers.length[layer, b, head]), cache.page_size
    ring = caches.ring_pages(cache.window, size)
    pages = np.asarray(cache.layers.page_table)[layer, b, head, ring : ring - (-length // size)]
    pool = np.asarray(cache.pages.pool, np.float64)
    return np.split(pool[pages].reshape(-1, pool.shape[-1])[:length], 2, 1)


def questions_over(model, policy, cache, lengths=QUESTIONS):
    """Return q, k, v and o by layer of questions of the given lengths to the two sequences."""
    with use_mesh(model):
        found = asked(model, policy.compile(model).decode, cache, np.array(lengths), tokens=max(lengths))
    return [np.asarray(x, np.float64) for x in found]


@functools.partial(jax.jit, static_argnames="tokens")
def asked(model, view, cache, valid, *, tokens):
    def attend(step, pages, xs):
        layer, view = xs
        o, _, pages, layer = cached_attention(
            view, step, pages, layer, seen=cache.seen, counted=cache.seen, valid=valid
        )
        return o, pages, (step.q, step.k, step.v, o)

    index = jnp.arange(tokens)
    ids = jnp.where(index < valid[:, None], 11 + index, 0)
    position = jnp.where(index < valid[:, None], cache.seen[:, None] + index, -1)
    return scan_layers(model, model.embed_tokens(ids), position, attend, cache.pages, (cache.layers, view))[2]


def test_questions_see_each_head_s_entries_and_themselves(model, policy, cache):
    lengths = np.asarray(cache.layers.length)
    assert len({tuple(lengths[layer, 0]) for layer in range(3)}) == 3
    assert all(len(set(lengths[layer, 0])) > 1 for layer in range(3))
    stored = {row: entries(cache, *row) for row in np.ndindex(lengths.shape)}
    q, k, v, o = questions_over(model, policy, cache)
    for (layer, b, head), (old_k, old_v) in stored.items():
        count, old = QUESTIONS[b], len(old_k)
        keys = np.concatenate([old_k, k[layer, b, head, :count]])
        values = np.concatenate([old_v, v[layer, b, head, :count]])
        sees = np.arange(old + count) <= old + np.arange(count)[:, None]
        for n in (2 * head, 2 * head + 1):
            p = softmax(np.where(sees, q[layer, b, n, :count] @ keys.T / np.sqrt(8), -np.inf))
            np.testing.assert_allclose(o[layer, b, n, :count], p @ values, atol=1e-5)


@pytest.mark.parametrize("lengths", [QUESTIONS, pytest.param((1, 1), marks=pytest.mark.thorough)])
def test_the_order_of_entries_does_not_change_answers(model, policy, cache, lengths):
    pool, table = np.array(cache.pages.pool), np.asarray(cache.layers.page_table)
    random, before = np.random.default_rng(0), np.array(cache.pages.pool)
    for row, length in np.ndenumerate(np.asarray(cache.layers.length)):
        place, order = np.arange(length), random.permutation(length)
        page, offset = table[row][place // 4], place % 4
        pool[page, offset] = before[page[order], offset[order]]
    assert (pool != before).any()
    shuffled = dataclasses.replace(cache.pages, pool=jax.device_put(pool, cache.pages.pool.sharding))
    found = questions_over(model, policy, dataclasses.replace(cache, pages=shuffled), lengths)
    np.testing.assert_allclose(found[3], questions_over(model, policy, cache, lengths)[3], atol=1e-5)


def test_chunks_do_not_change_the_kept_entries(model, policy, prompts, cache):
    """The observed queries are put together across chunks, of which the shorter prompt has fewer."""
    chunked = prefill(model, prompts, policy=policy, max_new_tokens=max(QUESTIONS), page_size=4, chunk=20)
    np.testing.assert_array_equal(chunked.layers.length, cache.layers.length)
    for row in np.ndindex(cache.layers.length.shape):
        np.testing.assert_allclose(entries(chunked, *row), entries(cache, *row), atol=1e-5)
