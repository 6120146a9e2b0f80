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
from kvjax.cache.forks import copies_of_shared_pages, forked_sequences
from kvjax.cache.packed_entries import packed, unpacked
from kvjax.mesh import make_mesh
from tests.cache.lists import (
    CALLS,
    HEADS,
    PAGE,
    TOKENS,
    advance,
    assert_bounds_match_keys,
    started,
    tables,
)

ROWS, ENTRIES, WINDOW = 4, CALLS * TOKENS, 5
RING = caches.ring_pages(WINDOW, PAGE)


@jax.jit
def moved(cache, kept):
    """Return the cache after a compaction. Before it, each head cache gets its own copy of shared pages."""
    pages, layers = copies_of_shared_pages(cache.pages, cache.layers, RING, True)
    cache = dataclasses.replace(cache, pages=pages, layers=layers)
    pages, layers = compaction.moved(cache.pages, cache.layers, kept[None], RING)
    return dataclasses.replace(cache, pages=pages, layers=layers)


@partial(jax.jit, static_argnames="rewrites_entries")
def forked(cache, index, rewrites_entries):
    forks = forked_sequences(
        cache.layers, cache.seen, cache.observations, cache.sliding, index, pages=cache.pages.pool.shape[0]
    )
    layers, seen, observations, _, (free, count, others) = forks
    pages = dataclasses.replace(cache.pages, free=free, free_count=count, others=others)
    pages, layers = copies_of_shared_pages(pages, layers, RING, rewrites_entries)
    rest = {"seen": seen, "origin": jnp.zeros_like(seen), "observations": observations}
    return dataclasses.replace(cache, pages=pages, layers=layers, **rest)


def saved(cache, alive):
    """Return the cache packed and unpacked again. The sequences that are alive come first, and share no pages."""
    mesh = make_mesh(devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        alone = dataclasses.replace(cache, pages=dataclasses.replace(cache.pages, others=None))
        sharding = jax.sharding.NamedSharding(mesh, P())
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), alone)
        loaded = jax.device_get(unpacked(like, packed(cache)))
    index = jnp.where(jnp.arange(ROWS) < alive.sum(), jnp.arange(ROWS), -1)
    return forked(jax.tree.map(jnp.asarray, loaded), index, False)


EVERY = 5
"""Number of writes between two full checks. An error stays in the cache, so a later check finds it."""


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
        own_pages = table[b, k, : -(-len(row) // PAGE)]
        np.testing.assert_array_equal(pool[own_pages].reshape(-1)[: len(row)], row)
        np.testing.assert_array_equal(born[own_pages].reshape(-1)[: len(row)], np.array(row, int) + 100 * k)
        slots = (int(cache.seen[b]) - len(ring) + np.arange(len(ring))) % (WINDOW - 1)
        np.testing.assert_array_equal(pool[rings[b, k, slots // PAGE], slots % PAGE], ring)
        taken = rings[b, k, : -(-len(ring) // PAGE)]
        assert (table[b, k, len(own_pages) :] >= len(pool)).all()
        assert (rings[b, k, len(taken) :] >= len(pool)).all()
        owners += [*own_pages, *taken]
    owners = np.bincount(np.array(owners, int), minlength=len(pool))
    free = np.asarray(pages.free)[: int(pages.free_count[0])].tolist()
    assert sorted(free) == np.flatnonzero(owners == 0).tolist()
    np.testing.assert_array_equal(pages.others, np.maximum(owners - 1, 0))
    assert_bounds_match_keys(cache)


def retained_pages(sequence):
    return sum(-(-len(row) // PAGE) for row in sequence.kept)


@pytest.mark.slow
@pytest.mark.parametrize("operations", [2_000, pytest.param(100_000, marks=pytest.mark.thorough)])
def test_forks_keep_their_own_tokens_and_pages_count_their_owners(operations):
    random = np.random.default_rng(operations)
    (_, cache), sequences = started(WINDOW, 1000), [Sequence() for _ in range(ROWS)]
    cache = forked(cache, jnp.array([0, 1, -1, -1]), False)
    counts = dict.fromkeys(("write", "compact", "fork", "save"), 0)
    alive, token, shared = np.arange(ROWS) < 2, 0, 0
    for _ in range(operations):
        free, pool_pages = int(cache.pages.free_count[0]), len(cache.pages.pool)
        operation = random.choice(list(counts), p=[0.5, 0.2, 0.29, 0.01])
        valid = random.integers(0, TOKENS + 1, ROWS) * alive
        longest = max(len(row) for sequence in sequences for row in sequence.kept)
        if operation == "write" and (
            longest > ENTRIES - TOKENS or free < HEADS * (RING + -(-valid // PAGE)).sum()
        ):
            operation = "compact"
        if operation == "compact" and free < sum(map(retained_pages, sequences)):
            operation = "fork"
        # a sequence without a token is not saved, and a saved one takes all its pages
        fits_unshared = sum(retained_pages(sequence) + RING * HEADS for sequence in sequences) <= pool_pages
        if operation == "save" and not (fits_unshared and (np.asarray(cache.seen)[alive] > 0).all()):
            operation = "fork"
        counts[operation] += 1
        if operation == "write":
            wanted = random.random((ROWS, HEADS, TOKENS)) < 0.7
            tokens = token + 1 + np.arange(ROWS * TOKENS).reshape(ROWS, TOKENS)
            token = int(tokens.max())
            pushed = jnp.asarray(wanted), jnp.asarray(valid, jnp.int32)
            cache = advance(cache, *pushed, WINDOW, jnp.asarray(tokens, jnp.int32))
            for b, count in enumerate(valid):
                sequences[b].push(tokens[b, :count].tolist(), wanted[b])
        elif operation == "compact":
            # some sequences lose many entries, some few and some none
            kept = random.random((ROWS, HEADS, ENTRIES)) < random.choice([0.2, 0.9, 1.0], (ROWS, 1, 1))
            exists = compaction.places(cache.layers.length[0], ENTRIES) >= 0
            cache = moved(cache, jnp.asarray(kept) & exists)
            for b, k in np.ndindex(ROWS, HEADS):
                row = sequences[b].kept[k]
                mask = kept[b, k, ENTRIES - len(row) :]
                sequences[b].kept[k] = [x for x, stays in zip(row, mask, strict=True) if stays]
        elif operation == "save":
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
            if sum(retained_pages(sequences[i]) + RING * HEADS for i in index[index >= 0]) > pool_pages:
                index[1:] = -1
            cache = forked(cache, jnp.asarray(index), random.random() < 0.25)
            sequences = [copy.deepcopy(sequences[i]) if i >= 0 else Sequence() for i in index]
            alive = index >= 0
        if counts["write"] % EVERY == 0:
            check(cache, sequences)
        shared += np.asarray(cache.pages.others).any()
    check(cache, sequences)
    assert min(n for operation, n in counts.items() if operation != "save") > operations // 20
    assert counts["save"] > operations // 500
    assert shared > operations // 6
