"""Tests of rollback: a cache that is rolled back equals the earlier cache, and running the same tokens again gives the
same logits."""

from functools import partial

import jax
import numpy as np
import pytest

from kvjax import cache as caches
from kvjax.cache.rollback import marked, rolled_back
from kvjax.inference import prefill
from kvjax.inference.forward import feed
from kvjax.mesh import make_mesh, use_mesh
from kvjax.policies import make_policy
from tests.inference.delayed import delayed
from tests.tiny_models import policies_for, tiny_model

TOKENS = np.random.default_rng(0).integers(0, 61, (2, 60))


def policies(model):
    capped = delayed(window=6, max_entries=7, delay=3)
    h2o = make_policy("h2o:entries=20,when=every,every=8", model=model)
    snapkv = make_policy("snapkv:entries=20,observed=5,when=every,every=8", model=model)
    return policies_for(model, 6) | {"h2o": h2o, "snapkv": snapkv, "max_entries": capped}


def content(cache):
    """Return the whole content of the cache: each head cache's entries with their metadata and bounds, and all else."""
    pages, ring = cache.pages, caches.ring_pages(cache.window, cache.page_size)
    table, length = np.asarray(cache.layers.page_table), np.asarray(cache.layers.length)
    arrays = []
    for row in np.ndindex(length.shape):
        used = table[row][: ring - (-length[row] // cache.page_size)]
        of_ring = used[:ring]
        entries = np.asarray(pages.pool)[used[ring:]].reshape(-1, pages.pool.shape[-1])[: length[row]]
        metadata = [np.asarray(x)[used[ring:]].reshape(-1)[: length[row]] for x in pages.metadata.values()]
        bounds = [] if pages.bounds is None else [np.asarray(pages.bounds)[used[ring:]]]
        arrays += [np.asarray(pages.pool)[of_ring], entries, *metadata, *bounds]
    rest = cache.layers, cache.seen, cache.observations, pages.free_count
    return [*arrays, *map(np.asarray, jax.tree.leaves(rest))]


@pytest.mark.parametrize(
    "name",
    [
        "wgkv",
        "quest",
        "max_entries",
        *(pytest.param(x, marks=pytest.mark.thorough) for x in ("full", "h2o", "snapkv")),
    ],
)
def test_a_rolled_back_cache_equals_the_marked_one(name):
    model = tiny_model()
    policy = policies(model)[name]
    shape = {"policy": policy, "page_size": 4, "max_new_tokens": 40}
    cache = prefill(model, [TOKENS[0, :20], TOKENS[1, :13]], **shape)
    before = content(cache)
    with use_mesh(model):
        compiled, mark = policy.compile(model), marked(cache)
        feed_rows = partial(feed, model, compiled.host, compiled.extend, chunk=16)
        free = np.asarray(mark.free)[: int(mark.free_count[0])]
        for rows in (TOKENS[:, 20:31], TOKENS[:, 31:32]):
            cache, first = feed_rows(cache, list(rows))
        cache = rolled_back(cache, mark)
        for restored, original in zip(content(cache), before, strict=True):
            np.testing.assert_array_equal(restored, original)
        np.testing.assert_array_equal(np.asarray(cache.pages.free)[: free.size], free)
        for rows in (TOKENS[:, 20:31], TOKENS[:, 31:32]):
            cache, again = feed_rows(cache, list(rows))
    np.testing.assert_array_equal(first, again)


@pytest.mark.mesh
@pytest.mark.thorough
def test_rollback_on_a_mesh():
    with jax.set_mesh(make_mesh(fsdp=2, tensor=4)):
        model = tiny_model()
        policy = policies_for(model, 6)["wgkv"]
        cache = prefill(model, TOKENS[:, :20], policy=policy, page_size=4, max_new_tokens=20)
        before = jax.device_get(cache.layers)
        entries = caches.stats(cache).entries
        compiled, mark = policy.compile(model), marked(cache)
        feed_rows = partial(feed, model, compiled.host, compiled.extend, chunk=16)
        cache, first = feed_rows(cache, list(TOKENS[:, 20:31]))
        cache = rolled_back(cache, mark)
        for restored, original in zip(*map(jax.tree.leaves, (cache.layers, before)), strict=True):
            np.testing.assert_array_equal(restored, original)
        np.testing.assert_array_equal(caches.stats(cache).entries, entries)
        cache, again = feed_rows(cache, list(TOKENS[:, 20:31]))
    np.testing.assert_array_equal(first, again)
