"""The cache's bookkeeping: pages and rings against lists, after any sequence of writes; the decode scan's memory."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import cache as caches
from kvjax.builtin import builtin_model
from kvjax.inference import room, sampling
from kvjax.inference.room import empty_cache, grown, trimmed
from kvjax.mesh import BATCH as SEQUENCES
from kvjax.mesh import make_mesh, put, use_mesh
from kvjax.models import load_model
from kvjax.policies import make_policy
from tests.cache.lists import (
    BATCH,
    CALLS,
    HEADS,
    PAGE,
    TOKENS,
    Lists,
    advance,
    assert_bounds_are_those_of_the_keys,
    calls,
    holds_exactly,
    started,
    tables,
)
from tests.tiny_models import tiny_gates


@pytest.mark.parametrize("window", [1, 5])
@settings(max_examples=60, deadline=None)
@given(calls=calls)
def test_pages_hold_exactly_what_was_kept_and_none_is_lost_or_shared(window, calls):
    (_, cache), lists = started(window, CALLS * TOKENS + window), Lists(window)
    ring = BATCH * HEADS * caches.ring_pages(window, PAGE)
    for valid, wanted in calls:
        wanted = np.array(wanted).reshape(BATCH, HEADS, TOKENS)
        cache = advance(cache, jnp.asarray(wanted), jnp.asarray(valid, jnp.int32), window)
        lists.push(valid, wanted)
        assert caches.stats(cache).pages == ring + lists.pages()
        first = sum(-(-len(row) // PAGE) for row in lists.kept[0])
        assert caches.stats(cache, 1).pages == ring // BATCH + first
        assert_bounds_are_those_of_the_keys(cache)
        holds_exactly(cache, lists, window)
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
@given(calls=calls, capacity=st.integers(6, 14))
def test_a_pool_that_runs_out_owes_what_was_missing_and_keeps_what_it_had(calls, capacity):
    window = 5
    (_, cache), lists = started(window, capacity), Lists(window)
    pool_pages, ring = cache.pages.pool.shape[0], BATCH * HEADS * caches.ring_pages(window, PAGE)
    for valid, wanted in calls:
        wanted = np.array(wanted).reshape(BATCH, HEADS, TOKENS)
        cache = advance(cache, jnp.asarray(wanted), jnp.asarray(valid, jnp.int32), window)
        lists.push(valid, wanted)
        assert int(cache.pages.free_count[0]) == pool_pages - ring - lists.pages()
        assert_bounds_are_those_of_the_keys(cache)
        pool, table = np.asarray(cache.pages.pool)[..., 1], tables(cache, window)
        owned = table[table < pool_pages]
        assert len(set(owned.tolist())) == len(owned)
        for b, k in np.ndindex(BATCH, HEADS):
            for page, first in zip(table[b, k], range(0, len(lists.kept[b][k]), PAGE), strict=False):
                if page < pool_pages:
                    row = lists.kept[b][k][first : first + PAGE]
                    np.testing.assert_array_equal(pool[page, : len(row)], row)


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


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("full", "float32"),
        ("wgkv", "float32"),
        ("quest", "float32"),
        ("wgkv", "bfloat16"),
        ("quest", "bfloat16"),
    ],
)
def test_decoding_carries_the_pool_and_never_copies_it(name, dtype):
    """Temporaries of the whole scan, and the pool-sized copies in its program. XLA on a CPU would convert 16-bit floats
    to float32 to scatter among them, and to take a layer's weights out of all."""
    model = load_model(builtin_model("test_model"), dtype=dtype)
    with use_mesh(model):
        policy = {
            "full": lambda: make_policy("full"),
            "wgkv": lambda: make_policy("wgkv", model=model, gates=tiny_gates(model), tau=0.5, window=6),
            "quest": lambda: make_policy("quest", model=model, ratio=0.25),
        }[name]()
        shape = {"layers": 2, "kv_heads": 4, "head_dim": model.config.head_dim}
        cache = empty_cache(policy, batch=2, **shape, tokens=16384, dtype=dtype, capacity=16384)
        token, running = put(np.zeros(2, np.int32), SEQUENCES), put(np.ones(2, bool), SEQUENCES)
        draw = sampling.Draw().arrays()
        program = sampling.decode_block.lower(
            model, policy, cache, token, running, draw, jax.random.key(0), np.int32(1), count=4, greedy=True
        ).compile()
    pool = cache.pages.pool
    for array in jax.tree.leaves((pool, cache.pages.bounds)):
        shape = f"[{','.join(map(str, array.shape))}]"
        made = [
            line for line in program.as_text().splitlines() if re.search(rf"= \w+{re.escape(shape)}", line)
        ]
        assert made
        assert not [line for line in made if " copy(" in line or "convert" in line]
    assert program.memory_analysis().temp_size_in_bytes < 0.1 * 4 * pool.size
    for weights in jax.tree.leaves(model.layers):
        if weights.ndim > 2 and dtype == "bfloat16":
            assert f"= f32[{','.join(map(str, weights.shape))}]" not in program.as_text()


@pytest.mark.parametrize("name", ["full", "wgkv", "h2o", "quest"])
def test_bits_of_16_bit_floats_are_those_of_a_pool_of_floats(name, monkeypatch):
    """On a CPU: the same entries, the same answers, over chunks, a compaction and a pool that grows."""
    model = load_model(builtin_model("test_model"), dtype="bfloat16")
    policy = {
        "full": lambda: make_policy("full"),
        "wgkv": lambda: make_policy("wgkv", model=model, gates=tiny_gates(model), tau=0.5, window=6),
        "h2o": lambda: make_policy("h2o", model=model, ratio=0.5),
        "quest": lambda: make_policy("quest", model=model, ratio=0.25),
    }[name]()
    prompts = [np.random.default_rng(size).integers(1, 200, size) for size in (40, 23)]

    def run():
        cache = sampling.prefill(model, prompts, policy=policy, page_size=PAGE, chunk=16, max_new_tokens=4)
        said = sampling.sample(model, [[5, 6], [7]], policy=policy, cache=cache, max_new_tokens=8)
        return cache.pages, [list(tokens) for tokens in said.tokens]

    (bits, said), _ = run(), monkeypatch.setattr(room, "on_cpu", lambda: False)
    floats, expected = run()
    assert (bits.pool.dtype, floats.pool.dtype) == (jnp.uint16, jnp.bfloat16)
    assert bits.pool.nbytes == floats.pool.nbytes
    if floats.bounds is not None:
        np.testing.assert_array_equal(bits.bounds, floats.bounds.astype(np.float32))
    assert bits.planes.keys() == floats.planes.keys()
    for name, plane in floats.planes.items():
        np.testing.assert_array_equal(bits.planes[name], plane)
    np.testing.assert_array_equal(bits.pool, np.asarray(floats.pool).view(np.uint16))
    assert said == expected
