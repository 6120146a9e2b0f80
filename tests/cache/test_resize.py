"""A cache that is resized to more or fewer pages holds what it held before."""

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
    assert_bounds_are_those_of_the_keys,
    calls,
    holds_exactly,
    started,
    tables,
)

WINDOW = 5


@settings(max_examples=12, deadline=None)
@given(calls=calls, sizes=st.sampled_from([(0, 3), (5, 0), (-20, 0), (-40, 2)]))
def test_a_cache_of_another_size_holds_the_same_and_goes_on(calls, sizes):
    (meshed, cache), lists = started(WINDOW, CALLS * TOKENS + 40), Lists(WINDOW)
    for count, (valid, wanted) in enumerate(calls):
        if count == len(calls) // 2:
            cache = resized(meshed, cache, *sizes)
            holds_exactly(cache, lists, WINDOW)
        wanted = np.array(wanted).reshape(BATCH, HEADS, TOKENS)
        cache = advance(cache, jnp.asarray(wanted), jnp.asarray(valid, jnp.int32), WINDOW)
        lists.push(valid, wanted)
    holds_exactly(cache, lists, WINDOW)
    assert_bounds_are_those_of_the_keys(cache)


def test_a_debt_stays():
    """A larger pool does not hide that a smaller one ran out."""
    meshed, cache = started(WINDOW, CALLS * TOKENS + 40)
    pages = dataclasses.replace(cache.pages, free_count=jnp.array([-3], jnp.int32))
    cache = resized(meshed, dataclasses.replace(cache, pages=pages), 8, 0)
    assert cache.pages.free_count.tolist() == [-3]


def resized(meshed, cache, pages, columns):
    """Return the cache, which is not on a mesh, with `pages` more pages and `columns` more columns."""
    had = cache.pages.pool.shape[0]
    with jax.set_mesh(make_mesh()):
        cache = jax.tree.map(lambda a, b: jax.device_put(np.asarray(a), b.sharding), cache, meshed)
        more = resize(cache, had + pages, columns)
    assert more.pages.pool.shape[0] == had + pages
    assert tables(more, WINDOW).shape[-1] == tables(cache, WINDOW).shape[-1] + columns
    return jax.tree.map(lambda a: jnp.asarray(np.asarray(a)), more)
