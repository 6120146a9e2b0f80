"""Tests of forks against lists, with random trees of forks, writes, compactions, saves and drops on a small pool."""

import copy
import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from kvjax import cache as caches
from kvjax.cache import compaction
from kvjax.cache.branches import branched_rows, with_copies
from kvjax.cache.packed_entries import packed, unpacked
from kvjax.mesh import make_mesh
from tests.cache.lists import (
    CALLS,
    HEADS,
    PAGE,
    TOKENS,
    advance,
    assert_bounds_are_those_of_the_keys,
    started,
    tables,
)

ROWS, ENTRIES, WINDOW = 4, CALLS * TOKENS, 5
RING = caches.ring_pages(WINDOW, PAGE)
NEWEST = 0, 0, 4, None
"""The numbers of newest entries that a method may still write to once they are stored. None means all of them."""


@jax.jit
def moved(cache, kept):
    """Return the cache after a compaction. Before it, each head cache gets its own copy of shared pages."""
    pages, layers = with_copies(cache.pages, cache.layers, RING, None)
    cache = dataclasses.replace(cache, pages=pages, layers=layers)
    pages, layers = compaction.moved(cache.pages, cache.layers, kept[None], RING)
    return dataclasses.replace(cache, pages=pages, layers=layers)


@partial(jax.jit, static_argnames="newest")
def branched(cache, index, newest):
    rows = branched_rows(
        cache.layers, cache.seen, cache.observations, cache.sliding, index, pages=cache.pages.pool.shape[0]
    )
    layers, seen, observations, _, (free, count, others) = rows
    pages = dataclasses.replace(cache.pages, free=free, free_count=count, others=others)
    pages, layers = with_copies(pages, layers, RING, newest)
    rest = {"seen": seen, "origin": jnp.zeros_like(seen), "observations": observations}
    return dataclasses.replace(cache, pages=pages, layers=layers, **rest)


def saved(cache, alive):
    """Return the cache packed and unpacked again, with the sequences that are alive first, each in pages of its own."""
    mesh = make_mesh(devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        alone = dataclasses.replace(cache, pages=dataclasses.replace(cache.pages, others=None))
        sharding = jax.sharding.NamedSharding(mesh, P())
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), alone)
        loaded = jax.device_get(unpacked(like, packed(cache)))
    index = jnp.where(jnp.arange(ROWS) < alive.sum(), jnp.arange(ROWS), -1)
    return branched(jax.tree.map(jnp.asarray, loaded), index, 0)


EVERY = 5
"""Number of writes between two full checks. An error is found later, too, because it stays in the cache."""


class Sequence:
    """A model of one sequence's cache: the tokens of its local window and of each head's retained entries, in order."""

    def __init__(self):
        self.ring, self.wish, self.kept = [], {}, [[] for _ in range(HEADS)]

    def push(self, tokens, wanted):
        for index, token in enumerate(tokens):
            self.ring.append(token)
            self.wish[token] = wanted[:, index]
            if len(self.ring) >= WINDOW:
                left = self.ring.pop(0)
                for row, stays in zip(self.kept, self.wish.pop(left), strict=True):
                    row += [left] * bool(stays)


def check(cache, sequences):
    """Assert that every head cache holds exactly its own tokens with their numbers, and that every page is free or has
    as many owners as it counts."""
    pages, layers = cache.pages, jax.tree.map(lambda x: np.asarray(x)[0], cache.layers)
    pool, born = np.asarray(pages.pool)[..., 1], np.asarray(pages.metadata["born"])
    rings, table, owners = layers.page_table[..., :RING], tables(cache, WINDOW), []
    for b, k in np.ndindex(ROWS, HEADS):
        row, ring = sequences[b].kept[k], sequences[b].ring
        assert layers.length[b, k] == len(row)
        mine = table[b, k, : -(-len(row) // PAGE)]
        np.testing.assert_array_equal(pool[mine].reshape(-1)[: len(row)], row)
        np.testing.assert_array_equal(born[mine].reshape(-1)[: len(row)], np.array(row, int) + 100 * k)
        slots = (int(cache.seen[b]) - len(ring) + np.arange(len(ring))) % (WINDOW - 1)
        np.testing.assert_array_equal(pool[rings[b, k, slots // PAGE], slots % PAGE], ring)
        taken = rings[b, k, : -(-len(ring) // PAGE)]
        assert (table[b, k, len(mine) :] >= len(pool)).all()
        assert (rings[b, k, len(taken) :] >= len(pool)).all()
        owners += [*mine, *taken]
    owners = np.bincount(np.array(owners, int), minlength=len(pool))
    free = np.asarray(pages.free)[: int(pages.free_count[0])].tolist()
    assert sorted(free) == np.flatnonzero(owners == 0).tolist()
    np.testing.assert_array_equal(pages.others, np.maximum(owners - 1, 0))
    assert_bounds_are_those_of_the_keys(cache)


def pages_of(sequence):
    return sum(-(-len(row) // PAGE) for row in sequence.kept)


@pytest.mark.parametrize("operations", [2_000, pytest.param(100_000, marks=pytest.mark.thorough)])
def test_every_row_keeps_what_is_its_own_and_every_page_its_count(operations):
    random = np.random.default_rng(operations)
    (_, cache), sequences = started(WINDOW, 1000), [Sequence() for _ in range(ROWS)]
    cache = branched(cache, jnp.array([0, 1, -1, -1]), 0)
    alive, token, done, shared = (
        np.arange(ROWS) < 2,
        0,
        dict.fromkeys(("write", "compact", "branch", "save"), 0),
        0,
    )
    for _ in range(operations):
        free, what = int(cache.pages.free_count[0]), random.choice(list(done), p=[0.5, 0.2, 0.29, 0.01])
        valid = random.integers(0, TOKENS + 1, ROWS) * alive
        longest = max(len(row) for one in sequences for row in one.kept)
        if what == "write" and (
            longest > ENTRIES - TOKENS or free < HEADS * (RING + -(-valid // PAGE)).sum()
        ):
            what = "compact"
        if what == "compact" and free < sum(map(pages_of, sequences)):
            what = "branch"
        # a sequence without a token is not saved, and a saved one takes all its pages
        whole = sum(pages_of(one) + RING * HEADS for one in sequences) <= len(cache.pages.pool)
        if what == "save" and not (whole and (np.asarray(cache.seen)[alive] > 0).all()):
            what = "branch"
        done[what] += 1
        if what == "write":
            wanted = random.random((ROWS, HEADS, TOKENS)) < 0.7
            tokens = token + 1 + np.arange(ROWS * TOKENS).reshape(ROWS, TOKENS)
            token = int(tokens.max())
            pushed = jnp.asarray(wanted), jnp.asarray(valid, jnp.int32)
            cache = advance(cache, *pushed, WINDOW, jnp.asarray(tokens, jnp.int32))
            for b, count in enumerate(valid):
                sequences[b].push(tokens[b, :count].tolist(), wanted[b])
        elif what == "compact":
            # some sequences lose many entries, some few and some none
            kept = random.random((ROWS, HEADS, ENTRIES)) < random.choice([0.2, 0.9, 1.0], (ROWS, 1, 1))
            exists = compaction.places(cache.layers.length[0], ENTRIES) >= 0
            cache = moved(cache, jnp.asarray(kept) & exists)
            for b, k in np.ndindex(ROWS, HEADS):
                row = sequences[b].kept[k]
                mask = kept[b, k, ENTRIES - len(row) :]
                sequences[b].kept[k] = [x for x, stays in zip(row, mask, strict=True) if stays]
        elif what == "save":
            cache = saved(cache, alive)
            sequences = [x for x, stays in zip(sequences, alive, strict=True) if stays]
            sequences += [Sequence() for _ in range(ROWS - len(sequences))]
            alive = np.sort(alive)[::-1]
            check(cache, sequences)
        else:
            # some sequences continue in one or more forks, and some are dropped; only the first fork continues if there
            # would not be enough pages for each to own all of its pages
            index = np.where(random.random(ROWS) < 0.7, random.choice(np.flatnonzero(alive), ROWS), -1)
            index[0] = random.choice(np.flatnonzero(alive))
            if sum(pages_of(sequences[i]) + RING * HEADS for i in index[index >= 0]) > len(cache.pages.pool):
                index[1:] = -1
            cache = branched(cache, jnp.asarray(index), NEWEST[random.integers(4)])
            sequences = [copy.deepcopy(sequences[i]) if i >= 0 else Sequence() for i in index]
            alive = index >= 0
        if done["write"] % EVERY == 0:
            check(cache, sequences)
        shared += np.asarray(cache.pages.others).any()
    check(cache, sequences)
    assert min(n for what, n in done.items() if what != "save") > operations // 20
    assert done["save"] > operations // 500
    assert shared > operations // 6
