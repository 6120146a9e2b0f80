"""Tests of the size of a pool: for prompts, after a compaction, for a question with its answer, and when it runs
out."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from kvjax import cache as caches
from kvjax.errors import UserError
from kvjax.inference import allocation, generate, prefill
from kvjax.inference.generate import forked
from kvjax.mesh import AXES, BATCH, HEADS, make_mesh, put, use_mesh
from kvjax.policies import make_policy
from kvjax.sampling_params import SamplingParams
from tests.inference.counting import START, admitted, counting
from tests.policies.captured import LENGTHS, PAGE, pages_are_whole, unnormed
from tests.tiny_models import tiny_gates, tiny_model

ROWS = 12
"""Number of head caches of a sequence."""


def answers(tokens, **more):
    return SamplingParams(max_new_tokens=tokens, ignore_eos=True, **more)


def admitting(model, rate, tau=0.5):
    """Return write gates whose pool is sized for `rate`, while their own rate is about a half."""
    return make_policy(
        {"wgkv": {"tau": tau, "window": 8, "rate": np.full((3, 4), rate)}},
        model=model,
        gates=tiny_gates(model),
    )


@pytest.mark.parametrize(
    ("platform", "tokens", "of_int8"), [("tpu", 64, [128, 32]), ("gpu", 16, [16, 16]), ("cpu", 16, [16, 16])]
)
def test_pages_are_larger_on_a_tpu_unless_they_are_selected(platform, tokens, of_int8):
    device = AbstractDevice(device_kind="a chip", num_cores=None, platform=platform)
    mesh = AbstractMesh((1,) * len(AXES), AXES, abstract_device=device)
    full, quest = make_policy("full"), make_policy("quest:tokens=64")
    with jax.sharding.use_abstract_mesh(mesh):
        assert [allocation.page_size_of(policy, None) for policy in (full, quest)] == [tokens, 16]
        assert [allocation.page_size_of(policy, 8) for policy in (full, quest)] == [8, 8]
        assert [allocation.page_size_of(policy, None, int8=True) for policy in (full, quest)] == of_int8


def stored(cache, length, seen):
    """Return the cache as if it held `length` entries of `seen` tokens."""
    layers = dataclasses.replace(cache.layers, length=put(length.astype(np.int32), None, BATCH, HEADS))
    return dataclasses.replace(cache, layers=layers, seen=put(seen.astype(np.int32), BATCH))


@pytest.mark.parametrize("name", ["full", "streaming_llm:window=7,sink=2", "wgkv"])
def test_more_pages_counts_the_pages_that_pushing_tokens_takes(name):
    """On a mesh, the count is that of the shard that takes most. Each head cache may retain all tokens that leave the
    window."""
    random = np.random.default_rng(0)
    with jax.set_mesh(make_mesh(fsdp=2, tensor=2)):
        model = tiny_model()
        policy = admitting(model, 0.5) if name == "wgkv" else make_policy(name)
        compiled = policy.compile(model)
        prompts = [np.zeros(n, int) for n in (40, 9, 1, 30)]
        empty, host = allocation.new_cache(model, compiled, prompts, 50, PAGE), compiled.host
        for tokens in (0, 1, 5, 30):
            seen = random.integers(0, 40, 4)
            left = np.maximum(seen - policy.window + 1, 0)
            length = random.integers(0, left[:, None] + 1, (3, 4, 4))
            more = np.zeros((2, 2), int)
            for layer, b, head in np.ndindex(length.shape):
                window, retained = min(seen[b], policy.window - 1), length[layer, b, head]
                before = -(-window // PAGE) - (-retained // PAGE)
                for _ in range(tokens):
                    window += 1
                    if window == policy.window:
                        window, retained = window - 1, retained + 1
                more[b // 2, head // 2] += -(-window // PAGE) - (-retained // PAGE) - before
            assert allocation.more_pages(host, stored(empty, length, seen), tokens) == more.max()


@pytest.mark.parametrize(
    ("have", "need", "tokens", "limit", "free", "size"),
    [
        (64, 70, 100, None, 1000, 128),  # the pool doubles
        (64, 150, 100, None, 1000, 160),  # the pool grows to what is needed, if that is more, rounded up
        (64, 70, 8, None, 1000, 88),  # 64 pages are in use, and the tokens may take 24
        (64, 70, 100, 100, 1000, 100),  # the stated capacity is the limit
        (
            64,
            110,
            100,
            100,
            1000,
            100,
        ),  # this leaves a debt, which is refused with a capacity that is enough
        (64, 70, 100, None, 90, 90),  # the free memory of the devices is the limit
    ],
)
def test_a_pool_grows_to_twice_its_size_or_the_needed_pages(
    model, exact, monkeypatch, have, need, tokens, limit, free, size
):
    policy, sizes = make_policy("full"), []

    def resize(cache, pages, columns):
        sizes.append(pages)
        return cache

    with use_mesh(model):
        cache = allocation.new_cache(model, policy.compile(model), [np.zeros(16, int)], 0, PAGE)
        page_bytes = cache.pages.nbytes // cache.pages.pool.shape[0]
        cache = allocation.resize(cache, have, 0)
        pages = dataclasses.replace(cache.pages, free_count=cache.pages.free_count * 0)
        cache = dataclasses.replace(cache, pages=pages, limit=limit)
        monkeypatch.setattr(allocation, "resize", resize)
        monkeypatch.setattr(caches, "device_bytes", lambda **_: free * page_bytes)
        allocation.grow(policy, cache, need, min(tokens, 4), tokens - min(tokens, 4))
        assert sizes == [size]
        monkeypatch.setattr(caches, "device_bytes", lambda **_: (min(need, limit or need) - 1) * page_bytes)
        with pytest.raises(
            caches.CapacityError, match=f"take {need} pages of {PAGE} tokens on a device, .* MiB"
        ):
            allocation.grow(policy, cache, need, min(tokens, 4), tokens - min(tokens, 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [{}, pytest.param({"fsdp": 2, "tensor": 2}, marks=pytest.mark.thorough)], ids=str
)
def test_a_grown_pool_gives_the_answers_of_a_large_one(prompts, shape, exact):
    """Tokens and log-probabilities are the same in a prompt's chunks, a question and an answer, and no token is
    lost."""
    with jax.set_mesh(make_mesh(**shape)):
        split = tiny_model()
        small, large = (admitting(split, rate) for rate in (0.01, 1.0))
        first = allocation.new_cache(split, small.compile(split), prompts, 0, PAGE).pages.pool.shape[0]
        grown, large_pool = (
            prefill(split, prompts, policy=policy, page_size=PAGE, chunk=16) for policy in (small, large)
        )
        assert grown.pages.pool.shape[0] > first
        if not shape:
            pages_are_whole(grown)
        for lengths, expected_lengths in zip(
            *map(jax.tree.leaves, (grown.layers.length, large_pool.layers.length)), strict=True
        ):
            np.testing.assert_array_equal(lengths, expected_lengths)
        questions = [prompt[:30] for prompt in prompts]
        found, expected = (
            generate(split, questions, answers(40, logprobs=3), policy=policy, cache=cache)
            for policy, cache in ((small, grown), (large, large_pool))
        )
    assert found.stats.pool_pages > grown.pages.pool.shape[0]
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.stats.entries, expected.stats.entries)
    for result, other in zip(found.logprobs, expected.logprobs, strict=True):
        np.testing.assert_array_equal(result.chosen, other.chosen)
        assert result.alternatives == other.alternatives


@pytest.mark.slow
def test_a_pool_shrinks_after_the_prompt_is_compacted(model, prompts, exact):
    """The pool holds what stayed and the announced answer, and the answer is that of a pool of stated size."""
    options = {"policy": make_policy("keydiff:ratio=0.25", model=model), "page_size": PAGE}
    small = prefill(model, prompts, **options)
    pages_are_whole(small)
    sizes = caches.stats(small)
    assert sizes.pages <= sizes.pool_pages <= 1.125 * sizes.pages
    assert sizes.bytes < 0.35 * sizes.full_bytes
    # as many tokens as the answers have, so that the programs are the same
    more = prefill(model, prompts, max_new_tokens=16, **options)
    need = sizes.pages + ROWS * 2 * 16 // PAGE
    assert need <= more.pages.pool.shape[0] <= 1.125 * need
    alone = generate(model, prompts, answers(16), **options)
    fixed = generate(model, prompts, answers(16), capacity=max(LENGTHS) + 20, **options)
    np.testing.assert_array_equal(alone.tokens, fixed.tokens)
    assert alone.stats.pool_pages < fixed.stats.pool_pages


@pytest.mark.thorough
def test_a_pool_shrinks_if_less_is_admitted_than_expected(prompts, monkeypatch):
    """The answer stays the same. A small pool and one of stated size do not shrink."""
    model = tiny_model()
    options = {"policy": admitting(model, 1.0, tau=0.9), "page_size": PAGE}
    stays = caches.stats(prefill(model, prompts, **options))
    monkeypatch.setattr(caches.sizes, "SMALL_POOL", 0)
    small = prefill(model, prompts, **options)
    held = caches.stats(small)
    assert held.pages <= held.pool_pages <= stays.pool_pages // 2
    np.testing.assert_array_equal(held.entries, stays.entries)
    pages_are_whole(small)
    stated = prefill(model, prompts, capacity=max(LENGTHS), **options)
    assert caches.stats(stated).pool_pages > held.pool_pages
    alone = generate(model, prompts, answers(20), **options)
    fixed = generate(model, prompts, answers(20), capacity=max(LENGTHS) + 20, **options)
    np.testing.assert_array_equal(alone.tokens, fixed.tokens)


@pytest.mark.slow
def test_pools_grow_up_to_the_stated_capacity(model, prompts, exact):
    """The pool begins with the smaller of the stated capacity and a full page table of the prompt. Beyond the capacity
    the error names one that is enough."""
    policy, limit = make_policy("full"), 140 * ROWS // PAGE
    cache = prefill(model, prompts[1:], policy=policy, page_size=PAGE, capacity=140)
    assert (cache.limit, cache.pages.pool.shape[0]) == (limit, ROWS * 128 // PAGE)
    question = [prompts[0][:40]]
    fits = generate(model, question, answers(140 - 41 - 40), policy=policy, cache=cache)
    assert fits.stats.pool_pages == limit
    with pytest.raises(caches.CapacityError, match="policy full needs at least") as error:
        generate(model, question, answers(97), policy=policy, cache=cache)
    enough = int(str(error.value).split("give a capacity of ")[1].split()[0])
    more = prefill(model, prompts[1:], policy=policy, page_size=PAGE, capacity=enough)
    long = generate(model, question, answers(97), policy=policy, cache=more)
    assert len(long.tokens[0]) == 97
    np.testing.assert_array_equal(fits.tokens[0], long.tokens[0][: 140 - 41 - 40])


@pytest.mark.thorough
def test_the_default_pool_depends_on_the_policy(model, monkeypatch):
    """Pools below a MiB are an exception: their sizes are powers of two."""
    full = caches.stats(prefill(model, [np.zeros(600, np.int64)]))
    assert full.kv_ratio == 1
    assert full.pool_pages == 512
    monkeypatch.setattr(caches.sizes, "SMALL_POOL", 0)
    prompt = [np.zeros(600, np.int64)]
    policy = make_policy("random:ratio=0.1,window=8", model=model)
    sizes = caches.stats(prefill(model, prompt, policy=policy))
    assert sizes.bytes < 0.25 * sizes.full_bytes
    full = caches.stats(prefill(model, prompt))
    assert full.kv_ratio == 1
    assert full.full_bytes <= full.bytes <= 1.125 * full.full_bytes


@pytest.mark.thorough
def test_the_default_pool_is_enough_for_random_admission(model):
    """Head caches differ from their mean, on short prompts by a page. A policy may also retain nothing at all."""
    prompt = [np.arange(25)]
    for seed in range(8):
        policy = make_policy({"random": {"ratio": 0.5, "window": 1, "seed": seed}}, model=model)
        assert caches.stats(prefill(model, prompt, policy=policy)).kv_ratio < 0.8
    nothing = make_policy("streaming_llm:sink=0,window=1", model=model)
    assert caches.stats(prefill(model, prompt, policy=nothing)).entries.sum() == 0


@pytest.mark.parametrize("window", [100, *(pytest.param(x, marks=pytest.mark.thorough) for x in (1, 300))])
def test_the_pool_size_depends_on_the_length_of_each_sequence(model, exact, window):
    """The size follows neither the longest sequence times the batch, nor the window of the policy."""
    policy = make_policy("full") if window == 1 else make_policy({"streaming_llm": {"window": window}})
    lengths = [256, *[40] * 7]
    cache = prefill(model, [np.arange(length) % 61 for length in lengths], policy=policy)
    sizes = caches.stats(cache)
    assert sizes.bytes <= 1.2 * sizes.full_bytes
    assert sizes.pages <= sizes.pool_pages == cache.pages.pool.shape[0]
    if window == 1:
        assert sizes.full_bytes <= sizes.bytes


@pytest.mark.thorough
def test_the_pool_of_a_compacted_answer_is_bounded_by_the_budget(model, exact):
    """The pool stays within this bound however long the answer gets."""
    policy = make_policy("h2o:entries=24,when=every,every=8", model=model)
    found = generate(model, [np.arange(12)], answers(100), policy=policy, page_size=PAGE)
    assert found.stats.pool_pages <= 1.125 * ROWS * (24 + 8 + 2 * PAGE) / PAGE
    stated = generate(model, [np.arange(12)], answers(100), policy=policy, page_size=PAGE, capacity=120)
    np.testing.assert_array_equal(found.tokens, stated.tokens)


def test_freed_pages_are_used_again(model, prompts):
    """The question and the answer fit into what the evicted entries left."""
    policy = make_policy("keydiff:ratio=0.25", model=model)
    cache = prefill(model, prompts, policy=policy, page_size=PAGE, capacity=max(LENGTHS) + 20)
    questions = [np.tile(prompt[:9], 3) for prompt in prompts]
    out = generate(model, questions, answers(16), policy=policy, cache=cache)
    assert out.stats.bytes == cache.pages.pool.nbytes
    assert [len(x) for x in out.tokens] == [16, 16]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "shape",
    [
        # several heads are on each of several devices; the end of the test compares with one device alone
        {"fsdp": 2, "tensor": 2},
        {},
        {"fsdp": 2, "tensor": 4},
    ],
    ids=str,
)
def test_memories_start_from_the_numbers_of_their_layer_and_heads(prompts, shape):
    """`init` reads a table by head and a number for all heads in a prompt, in its chunks and where a cache goes on."""
    question, window = np.arange(9), 6
    with jax.set_mesh(make_mesh(**shape)):
        split, policy = tiny_model(qk_norm=False), counting(window=window)
        for chunk in (max(LENGTHS), 16):
            cache = prefill(split, prompts, policy=policy, chunk=chunk, page_size=PAGE)
            counts, lengths = np.asarray(cache.layers.state.admission), np.asarray(cache.layers.length)
            for b, length in enumerate(LENGTHS):
                np.testing.assert_array_equal(counts[:, b], START + 2 + length)
                np.testing.assert_array_equal(lengths[:, b], admitted(length, window=window))
        out = generate(split, [question] * 2, answers(4), policy=policy, cache=cache)
    # nothing is stored of the last token of the answer
    held = np.stack([admitted(length + 9 + 3, window=window) for length in LENGTHS], 1)
    np.testing.assert_array_equal(out.stats.entries, held + window - 1)
    lines = [np.concatenate([prompt, question]) for prompt in prompts]
    alone = generate(unnormed(), lines, answers(4), policy=counting(window=window))
    np.testing.assert_array_equal(out.tokens, alone.tokens)


def test_an_answer_that_exceeds_the_memory_is_refused(model):
    with pytest.raises(UserError, match=r"of up to 2000000002 tokens, .* GiB free; \d+ tokens would fit"):
        generate(model, [[1, 2]], answers(2_000_000_000))


def test_the_length_that_a_refusal_names_fits(model, monkeypatch):
    monkeypatch.setattr(caches, "device_bytes", lambda **_: 10**6)
    policy = make_policy("full")
    with pytest.raises(UserError) as error:
        generate(model, [np.arange(50)] * 2, answers(10**5), policy=policy)
    named = int(str(error.value).split()[-4])
    prefill(model, [np.arange(50)] * 2, max_new_tokens=named - 50)
    with pytest.raises(UserError, match=f"{named} tokens would fit"):
        prefill(model, [np.arange(50)] * 2, max_new_tokens=named - 49)


@pytest.mark.slow
def test_a_copy_that_exceeds_the_memory_is_refused(model, monkeypatch):
    """This holds for a cache that is continued and for what its forks copy of it. Free memory beyond that is used."""
    policy = make_policy("h2o:entries=60,when=every,every=8", model=model)
    cache = prefill(model, [np.arange(50)], policy=policy, page_size=PAGE)
    page_bytes = cache.pages.nbytes // cache.pages.pool.shape[0]

    def asked(share, pages):
        monkeypatch.setattr(caches, "device_bytes", lambda **_: page_bytes * pages)
        forks = forked(cache, True, 1, 4)[0] if share else cache
        return allocation.copy_for_question(policy, forks, 200, 2).pages.pool.shape[0]

    with use_mesh(model):
        # each of 12 head caches has 13 pages of 4 tokens, and all of them may be written to
        for share, least in ((False, 12 * 13), (True, 4 * 12 * 13)):
            assert [asked(share, pages) for pages in (least, least + 1)] == [least, least + 1]
            with pytest.raises(
                caches.CapacityError, match="is copied, .* MiB on a device that has .* MiB free"
            ):
                asked(share, least - 1)
    with pytest.raises(caches.CapacityError, match="is copied"):
        generate(model, [[1, 2]] * 4, policy=policy, cache=cache, share=True)


@pytest.mark.parametrize(
    "named",
    [
        "snapkv:ratio=0.5,pyramidkv",
        *(pytest.param(f"snapkv:ratio=0.5{x}", marks=pytest.mark.thorough) for x in ("", ",adakv")),
    ],
)
def test_short_prompts_are_not_compacted(model, named):
    """The batch also has a long prompt, which is not kept whole."""
    policy = make_policy(named)
    sizes = caches.stats(prefill(model, [np.arange(256) % 61, np.arange(5)], policy=policy))
    assert sizes.entries.mean((0, 2)).tolist() == pytest.approx([128, 5], abs=1)


@pytest.mark.parametrize(
    "capacity", [3, *(pytest.param(x, marks=pytest.mark.thorough) for x in ("20KB", "1%"))]
)
def test_a_capacity_below_the_windows_is_refused_with_a_sufficient_one(model, prompts, monkeypatch, capacity):
    monkeypatch.setattr(caches.sizes, "device_bytes", lambda **_: 10**6)
    policy = make_policy("streaming_llm:sink=60,window=20")
    with pytest.raises(caches.CapacityError, match="that the windows of") as error:
        prefill(model, prompts, policy=policy, capacity=capacity)
    enough = caches.parse_capacity(str(error.value).split("; ")[1].split()[0])
    assert type(enough) is type(capacity)
    cache = prefill(model, prompts, policy=policy, capacity=enough)
    np.testing.assert_array_equal(caches.stats(cache).entries[0, :, 0], np.minimum(LENGTHS, 60 + 19))
