"""Tests of compaction's bookkeeping: pages and head caches against lists, after any sequence of writes and
evictions."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import cache as caches
from kvjax.cache import compaction
from tests.cache.lists import (
    BATCH,
    CALLS,
    HEADS,
    PAGE,
    TOKENS,
    Lists,
    advance,
    assert_bounds_match_keys,
    assert_holds,
    started,
)

ENTRIES = CALLS * TOKENS


@partial(jax.jit, static_argnames="ring")
def moved(cache, kept, ring):
    pages, layers = compaction.moved(cache.pages, cache.layers, kept[None], ring)
    return caches.Cache(
        pages, layers, cache.seen, cache.origin, cache.observations, cache.window, cache.limit
    )


wanted = st.lists(st.booleans(), min_size=BATCH * HEADS * TOKENS, max_size=BATCH * HEADS * TOKENS)
valid = st.lists(st.integers(0, TOKENS), min_size=BATCH, max_size=BATCH)
kept = st.lists(st.booleans(), min_size=BATCH * HEADS * ENTRIES, max_size=BATCH * HEADS * ENTRIES)
rounds = st.lists(st.tuples(valid, wanted, st.none() | kept), min_size=1, max_size=CALLS)


@pytest.mark.parametrize("window", [1, 5])
@settings(max_examples=60, deadline=None)
@given(rounds=rounds)
def test_compaction_keeps_the_order_and_loses_or_shares_no_page(window, rounds):
    (_, cache), lists = started(window, CALLS * TOKENS + window), Lists(window)
    ring = caches.ring_pages(window, PAGE)
    for valid, wanted, kept in rounds:
        wanted = np.array(wanted).reshape(BATCH, HEADS, TOKENS)
        cache = advance(cache, jnp.asarray(wanted), jnp.asarray(valid, jnp.int32), window)
        lists.push(valid, wanted)
        if kept is not None:
            # the newest entry is the last
            kept = np.array(kept).reshape(BATCH, HEADS, ENTRIES)
            exists = compaction.places(cache.layers.length[0], ENTRIES) >= 0
            cache = moved(cache, jnp.asarray(kept & exists), ring)
            for b, k in np.ndindex(BATCH, HEADS):
                row = lists.kept[b][k]
                mask = kept[b, k, ENTRIES - len(row) :]
                lists.kept[b][k] = [token for token, stays in zip(row, mask, strict=True) if stays]
        assert_bounds_match_keys(cache)
        assert_holds(cache, lists, window)


def test_compacting_one_sequence_leaves_others_in_the_pool_unchanged():
    """The engine compacts one prompt while other answers run. Here all of the prompt's entries are dropped."""
    _, cache = started(5, CALLS * TOKENS + 5)
    lists, wanted, valid = Lists(5), np.ones((BATCH, HEADS, TOKENS), bool), [TOKENS, TOKENS]
    for _ in range(3):
        cache = advance(cache, jnp.asarray(wanted), jnp.asarray(valid, jnp.int32), 5)
        lists.push(valid, wanted)
    alone, none = jax.tree.map(lambda x: x[:, :1], cache.layers), jnp.zeros((1, 1, HEADS, ENTRIES), bool)
    pages, alone = jax.jit(compaction.moved, static_argnums=3)(
        cache.pages, alone, none, caches.ring_pages(5, PAGE)
    )
    layers = jax.tree.map(lambda x, new: x.at[:, :1].set(new), cache.layers, alone)
    cache = dataclasses.replace(cache, pages=pages, layers=layers)
    lists.kept[0] = [[] for _ in range(HEADS)]
    assert_bounds_match_keys(cache)
    assert_holds(cache, lists, 5)


def test_eligible_entries_exclude_old_and_passed_over_ones():
    """Head caches of every length are checked entry by entry."""
    dropped, undecided, length, since = np.mgrid[:3, :3, :8, :8].reshape(4, 9, 64).astype(np.int32)
    none = jnp.zeros((1, 9, 1), jnp.int32)
    quota = caches.Quota(
        due=jnp.ones(9, bool), count=none, pinned=none, since=jnp.array(since)[None], last=none[0, :, 0],
        first=none[0, :, 0], floor=jnp.float32(0), dropped=jnp.array(dropped[:, 0]),
        undecided=jnp.array(undecided[:, 0]),
    )  # fmt: skip
    found = compaction.eligible_entries(jnp.array(length), jnp.array(since), 9, quota)
    for row in np.ndindex(9, 64):
        n, stop = length[row], length[row] - dropped[row] - undecided[row]
        wanted = [since[row] <= place < stop for place in range(n)]
        assert found[row].tolist() == [False] * (9 - n) + wanted
