"""Tests of a head cache's local window and pages against lists, after any sequence of writes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import cache as caches
from kvjax.errors import UserError
from kvjax.inference import prefill
from tests.cache.lists import (
    BATCH,
    CALLS,
    HEADS,
    PAGE,
    TOKENS,
    Lists,
    advance,
    advance_one,
    assert_bounds_match_keys,
    assert_holds,
    calls,
    started,
    tables,
)
from tests.inference.delayed import delayed


@pytest.mark.parametrize("window", [1, 5])
@settings(max_examples=60, deadline=None)
@given(calls=calls)
def test_pages_hold_the_kept_tokens_and_none_is_lost_or_shared(window, calls):
    (_, cache), lists = started(window, CALLS * TOKENS + window), Lists(window)
    for valid, wanted in calls:
        wanted = np.array(wanted).reshape(BATCH, HEADS, TOKENS)
        cache = advance(cache, jnp.asarray(wanted), jnp.asarray(valid, jnp.int32), window)
        lists.push(valid, wanted)
        assert caches.stats(cache).pages == lists.pages()
        assert caches.stats(cache, 1).pages == lists.pages(1)
        assert_bounds_match_keys(cache)
        assert_holds(cache, lists, window)
        layer = jax.tree.map(lambda a: a[0], cache.layers)
        if window > 1:
            held, exists = caches.ring_entries(cache.pages, layer, cache.seen, window - 1, window)
            for b in range(BATCH):
                found = np.asarray(held)[b, :, np.asarray(exists)[b], 1]
                np.testing.assert_array_equal(found, np.tile(lists.ring[b], (HEADS, 1)).T)
                slots = (np.array(lists.ring[b], int) - 1) % (window - 1)
                born = np.asarray(layer.numbers["born"])[b][:, slots]
                np.testing.assert_array_equal(
                    born, np.array(lists.ring[b], int) + 100 * np.arange(HEADS)[:, None]
                )


@settings(max_examples=40, deadline=None)
@given(calls=calls, capacity=st.sampled_from([6, 10, 14]))
def test_a_pool_that_runs_out_counts_missing_pages_and_overwrites_nothing(calls, capacity):
    window = 5
    (_, cache), lists = started(window, capacity), Lists(window)
    pool_pages = cache.pages.pool.shape[0]
    for valid, wanted in calls:
        wanted = np.array(wanted).reshape(BATCH, HEADS, TOKENS)
        cache = advance(cache, jnp.asarray(wanted), jnp.asarray(valid, jnp.int32), window)
        lists.push(valid, wanted)
        assert int(cache.pages.free_count[0]) == pool_pages - lists.pages()
        assert_bounds_match_keys(cache)
        pool, table = np.asarray(cache.pages.pool)[..., 1], tables(cache, window)
        owned = table[table < pool_pages]
        assert len(set(owned.tolist())) == len(owned)
        for b, k in np.ndindex(BATCH, HEADS):
            for page, first in zip(table[b, k], range(0, len(lists.kept[b][k]), PAGE), strict=False):
                if page < pool_pages:
                    row = lists.kept[b][k][first : first + PAGE]
                    np.testing.assert_array_equal(pool[page, : len(row)], row)


@pytest.mark.parametrize("window", [1, 5])
@settings(max_examples=30, deadline=None)
@given(calls=calls, capacity=st.sampled_from([6, 14, CALLS * TOKENS + 5]))
def test_writing_tokens_one_by_one_equals_writing_them_at_once(window, calls, capacity):
    """The test ends when the pool runs out."""
    (_, cache), lists = started(window, capacity), Lists(window)
    pool_pages = cache.pages.pool.shape[0]
    for valid, wanted in calls:
        wanted = np.array(wanted).reshape(BATCH, HEADS, TOKENS)
        for index in range(TOKENS):
            runs = (index < np.array(valid)).astype(np.int32)
            cache = advance_one(cache, jnp.asarray(wanted[..., index]), jnp.asarray(runs), window)
            lists.push(runs, wanted[..., index:])
            free = int(cache.pages.free_count[0])
            if free < 0:
                # up to this many of the pages reserved for others may have been unused
                assert lists.pages() > pool_pages - 2 * BATCH * HEADS
                return
            assert free == pool_pages - lists.pages()
            assert_bounds_match_keys(cache)
            assert_holds(cache, lists, window)


def test_a_delay_needs_a_larger_window(model, tokens):
    with pytest.raises(UserError, match="known 6 tokens late need a window of more than 6 tokens, got 6"):
        prefill(model, tokens, policy=delayed(window=6, delay=6))
