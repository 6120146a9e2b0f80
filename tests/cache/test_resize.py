"""A cache with more pages or fewer against the one that it was made of."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import cache as caches
from kvjax.inference.allocation import grown, trimmed
from kvjax.mesh import make_mesh
from tests.cache.lists import (
    BATCH,
    CALLS,
    HEADS,
    TOKENS,
    advance,
    assert_bounds_are_those_of_the_keys,
    calls,
    started,
    tables,
)


@settings(max_examples=8, deadline=None)
@given(calls=calls, room=st.sampled_from([(0, 3), (5, 0), (3, 2)]))
def test_a_grown_cache_holds_the_same_and_has_the_room_and_trimmed_it_is_small(calls, room):
    window = 5
    meshed, cache = started(window, CALLS * TOKENS + window)
    for valid, wanted in calls:
        wanted = np.array(wanted).reshape(BATCH, HEADS, TOKENS)
        cache = advance(cache, jnp.asarray(wanted), jnp.asarray(valid, jnp.int32), window)
    with jax.set_mesh(make_mesh()):
        placed = jax.tree.map(lambda a, b: jax.device_put(np.asarray(a), b.sharding), cache, meshed)
        had, (pages, columns) = cache.pages.pool.shape[0], room
        more = grown(placed, pages, columns)
        less = trimmed(more, had)
    np.testing.assert_array_equal(more.pages.pool[:had], cache.pages.pool)
    np.testing.assert_array_equal(more.pages.planes["born"][:had], cache.pages.planes["born"])
    assert int(more.pages.free_count[0]) == int(cache.pages.free_count[0]) + pages
    before, after = tables(cache, window), tables(more, window)
    assert after.shape[-1] == before.shape[-1] + columns
    none = before >= had
    np.testing.assert_array_equal(after[..., : before.shape[-1]][~none], before[~none])
    assert (after[..., : before.shape[-1]][none] >= had + pages).all()
    free = np.asarray(more.pages.free)[: int(more.pages.free_count[0])].tolist()
    assert len(set(free)) == len(free)
    assert not set(free) & set(before[~none].tolist())
    assert set(range(had, had + pages)) <= set(free)
    assert_bounds_are_those_of_the_keys(more)
    assert_bounds_are_those_of_the_keys(less)
    assert caches.stats(less).pages == caches.stats(cache).pages
    assert less.pages.pool.shape[0] == had
    moved = tables(less, window)[..., : before.shape[-1]][~none]
    np.testing.assert_array_equal(
        np.asarray(less.pages.pool)[moved], np.asarray(cache.pages.pool)[before[~none]]
    )
    born = (np.asarray(x.pages.planes["born"]) for x in (less, cache))
    np.testing.assert_array_equal(next(born)[moved], next(born)[before[~none]])
