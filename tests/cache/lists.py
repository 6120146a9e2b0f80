"""A model of a one-layer cache as plain lists, and functions that write the same tokens to a real cache."""

import dataclasses
from functools import cache as remembered
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from kvjax import cache as caches
from kvjax.inference.allocation import empty_cache
from kvjax.mesh import BATCH as SEQUENCES
from kvjax.mesh import HEADS as SPLIT
from kvjax.mesh import SHARDS, make_mesh, put
from kvjax.policies import make_policy
from kvjax.policies.compiled import compile_policy
from pallas_kernels.paged_decode.append import append_tokens

BATCH, HEADS, TOKENS, PAGE = 2, 2, 6, 3
CALLS = 5


class Lists:
    """A model of a one-layer cache: for each head cache, the tokens of its local window and its retained entries, in
    order.

    A token is the number of its position within its sequence, from 1.
    """

    def __init__(self, window: int):
        self.slots = window - 1
        self.ring = [[] for _ in range(BATCH)]
        self.kept = [[[] for _ in range(HEADS)] for _ in range(BATCH)]
        self.wish = [[[] for _ in range(HEADS)] for _ in range(BATCH)]
        self.seen = [0] * BATCH

    def push(self, valid, wanted):
        for b, count in enumerate(valid):
            for index in range(count):
                self.seen[b] += 1
                self.ring[b].append(self.seen[b])
                for k in range(HEADS):
                    self.wish[b][k].append(wanted[b][k][index])
                if len(self.ring[b]) > self.slots:
                    token = self.ring[b].pop(0)
                    for k in range(HEADS):
                        if self.wish[b][k][token - 1]:
                            self.kept[b][k].append(token)

    def pages(self, sequences: int = BATCH) -> int:
        """Return the pages that the local windows and retained entries of the first `sequences` sequences need."""
        rows = [*self.kept, *([ring] * HEADS for ring in self.ring)]
        return sum(
            -(-len(row) // PAGE) for b, rows in enumerate(rows) if b % BATCH < sequences for row in rows
        )


@partial(jax.jit, static_argnames="window")
def advance(cache: caches.Cache, wanted, valid, window: int, token=None):
    """Push up to TOKENS tokens per sequence as `cached_attention` does. `token` is [b t], by default the positions."""
    layer = jax.tree.map(lambda a: a[0], cache.layers)
    token = cache.seen[:, None] + 1 + jnp.arange(TOKENS) if token is None else token
    # the keys are in no order, so that any of a page's keys may be the smallest or the largest
    kv = jnp.stack([token * 7 % 11 - 5, token], -1).astype(jnp.float32)
    kv = jnp.broadcast_to(kv[:, None], (len(valid), HEADS, TOKENS, 2))
    priority = caches.ring_priority(layer, cache.seen, wanted.astype(jnp.float32), valid, 0)
    numbers = {"born": token[:, None] + 100 * jnp.arange(HEADS)[:, None]}
    turnover = caches.Turnover(priority[..., :TOKENS] > 0.5)
    written = (kv, priority, turnover, numbers, cache.seen, valid, window)
    pages, layer = caches.push(cache.pages, layer, *written)
    layers = jax.tree.map(lambda a: a[None], layer)
    return dataclasses.replace(cache, pages=pages, layers=layers, seen=cache.seen + valid)


@partial(jax.jit, static_argnames="window")
def advance_one(cache: caches.Cache, wanted, valid, window: int):
    """Push one token of each sequence, or none, as decoding does: pages are reserved and unused ones taken back."""
    layers, reserved = caches.reserve(cache.pages, cache.layers, cache.seen, valid, window)
    layer = jax.tree.map(lambda a: a[0], layers)
    token = (cache.seen + 1)[:, None]
    kv = jnp.stack([token * 7 % 11 - 5, token], -1).astype(jnp.float32)
    kv = jnp.broadcast_to(kv[:, None], (len(valid), HEADS, 1, 2))
    numbers = {"born": token[:, None] + 100 * jnp.arange(HEADS)[:, None]}
    priority = wanted[..., None].astype(jnp.float32)
    layer, oldest = caches.slot_priority(layer, cache.seen, priority, valid, 0)
    at = caches.place_one(cache.pages, layer, caches.Turnover(oldest > 0.5), cache.seen, valid, window)
    pool = append_tokens(cache.pages.pool, at.append, (kv[..., :1], kv[..., 1:]), jnp.zeros(kv.shape[:3]))
    pages = dataclasses.replace(cache.pages, pool=pool)
    pages, layer = caches.push_one(pages, layer, at, oldest, numbers, cache.seen, valid, window)
    layers = jax.tree.map(lambda a: a[None], layer)
    pages, layers = caches.release_unused(pages, layers, reserved, cache.layers.length)
    return dataclasses.replace(cache, pages=pages, layers=layers, seen=cache.seen + valid)


@remembered
def started(window: int, capacity: int) -> tuple[caches.Cache, caches.Cache]:
    """Return an empty cache on a mesh of one device, and the same without a mesh, for the functions local to a shard.
    It has two metadata fields, of which one is never written."""
    with jax.set_mesh(make_mesh()):
        policy = compile_policy(make_policy({"full": {"window": window}, "quest": {"tokens": 8}}), 1, HEADS)
        cache = empty_cache(
            policy, batch=BATCH, layers=1, kv_heads=HEADS, head_dim=1, tokens=CALLS * TOKENS, dtype=jnp.float32,
            page_size=PAGE, capacity=capacity,
        )  # fmt: skip
        shapes = cache.pages.pool.shape[:2], cache.layers.priority.shape
        metadata, numbers = (
            {"born": put(np.zeros(x, np.int32), *spec), "unused": put(np.zeros(x, np.float32), *spec)}
            for x, spec in zip(shapes, ((SHARDS, None), (None, SEQUENCES, SPLIT, None)), strict=True)
        )
        cache = dataclasses.replace(
            cache,
            pages=dataclasses.replace(cache.pages, metadata=metadata),
            layers=dataclasses.replace(cache.layers, numbers=numbers),
        )
    return cache, jax.tree.map(lambda a: jnp.asarray(np.asarray(a)), cache)


def tables(cache: caches.Cache, window: int) -> np.ndarray:
    """Return the page table's columns for the retained entries, [b k c]."""
    return np.asarray(cache.layers.page_table)[0, :, :, caches.ring_pages(window, PAGE) :]


def assert_bounds_match_keys(cache: caches.Cache):
    """Assert that the bounds are those of the keys that each page of the pool holds, and infinite for empty pages."""
    pages, length = cache.pages, np.asarray(cache.layers.length)[0]
    pool, want = np.asarray(pages.pool), np.full(pages.bounds.shape, np.inf)
    table = tables(cache, cache.window)
    for b, k, column in np.ndindex(table.shape):
        keys = pool[min(table[b, k, column], len(pool) - 1), : max(0, length[b, k] - column * PAGE), 0]
        if len(keys) and table[b, k, column] < len(pool):
            want[table[b, k, column]] = keys.min(), -keys.max()
    np.testing.assert_array_equal(pages.bounds, want)


calls = st.lists(
    st.tuples(
        st.lists(st.integers(0, TOKENS), min_size=BATCH, max_size=BATCH),
        st.lists(st.booleans(), min_size=BATCH * HEADS * TOKENS, max_size=BATCH * HEADS * TOKENS),
    ),
    min_size=1,
    max_size=CALLS,
)


def assert_holds(cache, lists, window):
    """Assert that the head caches hold the tokens of the lists in order, with their numbers, and that every page
    belongs to retained entries or a local window, or is free."""
    pool, table = np.asarray(cache.pages.pool)[..., 1], tables(cache, window)
    born = np.asarray(cache.pages.metadata["born"])
    used = []
    for b, k in np.ndindex(BATCH, HEADS):
        row = lists.kept[b][k]
        assert cache.layers.length[0, b, k] == len(row)
        pages = table[b, k, : -(-len(row) // PAGE)]
        np.testing.assert_array_equal(pool[pages].reshape(-1)[: len(row)], row)
        np.testing.assert_array_equal(born[pages].reshape(-1)[: len(row)], np.array(row, int) + 100 * k)
        assert (table[b, k, len(pages) :] >= len(pool)).all()
        used += pages.tolist()
    free = np.asarray(cache.pages.free)[: int(cache.pages.free_count[0])].tolist()
    for b, rings in enumerate(
        np.asarray(cache.layers.page_table)[0, :, :, : caches.ring_pages(window, PAGE)]
    ):
        taken = -(-len(lists.ring[b]) // PAGE)
        assert (rings[:, taken:] >= len(pool)).all()
        used += rings[:, :taken].reshape(-1).tolist()
    assert sorted([*used, *free]) == list(range(len(pool)))
