"""Tests of resizing: a cache with more or fewer pages holds the same entries."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.inference.allocation import resize
from kvjax.mesh import make_mesh
from tests.cache.lists import (
    BATCH,
    CALLS,
    HEADS,
    TOKENS,
    Lists,
    advance,
    assert_bounds_match_keys,
    assert_holds,
    calls,
    started,
    tables,
)

WINDOW = 5


@settings(max_examples=12, deadline=None)
@given(calls=calls, sizes=st.sampled_from([(0, 3), (5, 0), (-20, 0), (-40, 2)]))
def test_a_resized_cache_holds_the_same_entries_and_can_be_continued(calls, sizes):
    (meshed, cache), lists = started(WINDOW, CALLS * TOKENS + 40), Lists(WINDOW)
    for count, (valid, wanted) in enumerate(calls):
        if count == len(calls) // 2:
            cache = resized(meshed, cache, *sizes)
            assert_holds(cache, lists, WINDOW)
        wanted = np.array(wanted).reshape(BATCH, HEADS, TOKENS)
        cache = advance(cache, jnp.asarray(wanted), jnp.asarray(valid, jnp.int32), WINDOW)
        lists.push(valid, wanted)
    assert_holds(cache, lists, WINDOW)
    assert_bounds_match_keys(cache)


def test_resizing_keeps_a_debt():
    """A larger pool does not hide that a smaller one ran out."""
    meshed, cache = started(WINDOW, CALLS * TOKENS + 40)
    pages = dataclasses.replace(cache.pages, free_count=jnp.array([-3], jnp.int32))
    cache = resized(meshed, dataclasses.replace(cache, pages=pages), 8, 0)
    assert cache.pages.free_count.tolist() == [-3]


def resized(meshed, cache, pages, columns):
    """Return the cache, which is not on a mesh, with `pages` more pages and `columns` more columns."""
    old_pages = cache.pages.pool.shape[0]
    with jax.set_mesh(make_mesh()):
        cache = jax.tree.map(lambda a, b: jax.device_put(np.asarray(a), b.sharding), cache, meshed)
        resized_cache = resize(cache, old_pages + pages, columns)
    assert resized_cache.pages.pool.shape[0] == old_pages + pages
    assert tables(resized_cache, WINDOW).shape[-1] == tables(cache, WINDOW).shape[-1] + columns
    return jax.tree.map(lambda a: jnp.asarray(np.asarray(a)), resized_cache)
