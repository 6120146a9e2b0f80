"""How large a pool is: by default, after a compaction, and for an answer to come."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from kvjax import cache as caches
from kvjax import inference
from kvjax.errors import UserError
from kvjax.inference.allocation import new_cache, page_size_of, with_room
from kvjax.inference.sharing import branched
from kvjax.mesh import AXES, make_mesh, use_mesh
from kvjax.policies import make_policy
from kvjax.sampling_params import SamplingParams
from tests.inference.counting import START, admitted, counting
from tests.policies.captured import LENGTHS, PAGE, pages_are_whole, unnormed
from tests.tiny_models import tiny_gates, tiny_model


@pytest.fixture(scope="module")
def model():
    return unnormed()


@pytest.mark.parametrize(("platform", "tokens"), [("tpu", 64), ("gpu", 16), ("cpu", 16)])
def test_pages_are_larger_on_a_tpu_unless_they_are_selected(platform, tokens):
    device = AbstractDevice(device_kind="a chip", num_cores=None, platform=platform)
    mesh = AbstractMesh((1,) * len(AXES), AXES, abstract_device=device)
    full, quest = make_policy("full"), make_policy("quest:tokens=64")
    with jax.sharding.use_abstract_mesh(mesh):
        assert [page_size_of(policy, None) for policy in (full, quest)] == [tokens, 16]
        assert [page_size_of(policy, 8) for policy in (full, quest)] == [8, 8]


@pytest.mark.thorough
def test_the_default_pool_follows_the_policy_not_the_context(model, monkeypatch):
    """But for pools below a MiB, which are powers of two."""
    full = caches.stats(inference.prefill(model, [np.zeros(600, np.int64)]))
    assert full.kv_ratio == 1
    assert full.pool_pages == 512
    monkeypatch.setattr(caches.sizes, "SMALL_POOL", 0)
    prompt = [np.zeros(600, np.int64)]
    policy = make_policy("random:ratio=0.1,window=8", model=model)
    sizes = caches.stats(inference.prefill(model, prompt, policy=policy))
    assert sizes.bytes < 0.25 * sizes.full_bytes
    full = caches.stats(inference.prefill(model, prompt))
    assert full.kv_ratio == 1
    assert full.full_bytes <= full.bytes <= 1.125 * full.full_bytes


@pytest.mark.thorough
def test_the_default_pool_holds_what_chance_admits(model):
    """Rows differ from their mean, on short prompts by a page; and nothing at all may be kept."""
    prompt = [np.arange(25)]
    for seed in range(8):
        policy = make_policy({"random": {"ratio": 0.5, "window": 1, "seed": seed}}, model=model)
        assert caches.stats(inference.prefill(model, prompt, policy=policy)).kv_ratio < 0.8
    nothing = make_policy("streaming_llm:sink=0,window=1", model=model)
    assert caches.stats(inference.prefill(model, prompt, policy=nothing)).entries.sum() == 0


@pytest.mark.thorough
def test_the_pool_shrinks_to_what_stayed(model, prompts, monkeypatch):
    """With room for what was announced, and none of it lost: the answer is that of a cache of stated size."""
    monkeypatch.setattr(caches.sizes, "SMALL_POOL", 0)
    options = {"policy": make_policy("keydiff:ratio=0.25", model=model), "page_size": PAGE}
    small = inference.prefill(model, prompts, **options)
    pages_are_whole(small)
    assert caches.stats(small).pages <= small.pages.pool.shape[0] <= 1.125 * caches.stats(small).pages
    assert (
        caches.stats(small).bytes
        < 0.35 * caches.stats(inference.prefill(model, prompts, page_size=PAGE)).bytes
    )
    sampling = SamplingParams(max_new_tokens=9, ignore_eos=True)
    fixed = inference.generate(model, prompts, sampling, capacity=max(LENGTHS) + 12, **options)
    grown = inference.generate(model, prompts, sampling, **options)
    np.testing.assert_array_equal(grown.tokens, fixed.tokens)


def test_freed_pages_are_used_again(model, prompts):
    """The question and the answer fit into what the evicted entries left."""
    policy = make_policy("keydiff:ratio=0.25", model=model)
    cache = inference.prefill(model, prompts, policy=policy, page_size=PAGE, capacity=max(LENGTHS))
    questions = [prompt[:9] for prompt in prompts]
    out = inference.generate(
        model, questions, SamplingParams(max_new_tokens=8, ignore_eos=True), policy=policy, cache=cache
    )
    assert out.stats.bytes == cache.pages.pool.nbytes
    assert [len(x) for x in out.tokens] == [8, 8]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "shape",
    [
        # several heads on each of several devices, beside one device alone at the end
        {"fsdp": 2, "tensor": 2},
        {},
        {"fsdp": 2, "tensor": 4},
    ],
    ids=str,
)
def test_a_memory_begins_with_the_numbers_of_its_layer_and_heads(prompts, shape):
    """A table by head and a number for all, read by `init`: in a prompt, in its chunks and where a cache goes on."""
    question, window = np.arange(9), 6
    with jax.set_mesh(make_mesh(**shape)):
        split, policy = tiny_model(qk_norm=False), counting(window=window)
        for chunk in (max(LENGTHS), 16):
            cache = inference.prefill(split, prompts, policy=policy, chunk=chunk, page_size=PAGE)
            counts, lengths = np.asarray(cache.layers.state.admission), np.asarray(cache.layers.length)
            for b, length in enumerate(LENGTHS):
                np.testing.assert_array_equal(counts[:, b], START + 2 + length)
                np.testing.assert_array_equal(lengths[:, b], admitted(length, window=window))
        out = inference.generate(
            split,
            [question] * 2,
            SamplingParams(max_new_tokens=4, ignore_eos=True),
            policy=policy,
            cache=cache,
        )
    # of the last token that was said, nothing is stored
    held = np.stack([admitted(length + 9 + 3, window=window) for length in LENGTHS], 1)
    np.testing.assert_array_equal(out.stats.entries, held + window - 1)
    lines = [np.concatenate([prompt, question]) for prompt in prompts]
    alone = inference.generate(
        unnormed(), lines, SamplingParams(max_new_tokens=4, ignore_eos=True), policy=counting(window=window)
    )
    np.testing.assert_array_equal(out.tokens, alone.tokens)


def admitting(model, rate, tau=0.5):
    """Write gates whose pool is sized for another rate than theirs, which is about a half."""
    return make_policy(
        {"wgkv": {"tau": tau, "window": 8, "rate": np.full((3, 4), rate)}},
        model=model,
        gates=tiny_gates(model),
    )


@pytest.mark.parametrize(
    "shape", [{}, pytest.param({"fsdp": 2, "tensor": 2}, marks=pytest.mark.thorough)], ids=str
)
def test_a_pool_that_is_too_small_grows(prompts, shape, monkeypatch):
    """In a prompt's chunks, a question and an answer: what is said, and what is held, is that of a pool with room."""
    monkeypatch.setattr(caches.sizes, "SMALL_POOL", 0)
    with jax.set_mesh(make_mesh(**shape)):
        split = tiny_model()
        options = {"page_size": PAGE, "chunk": 16}
        sampling = SamplingParams(max_new_tokens=40, ignore_eos=True)
        small, large = (admitting(split, rate) for rate in (0.01, 1.0))
        grown = inference.prefill(split, prompts, policy=small, **options)
        first = caches.stats(new_cache(split, small.compile(split), prompts, 0, PAGE, None)).pool_pages
        held, room = caches.stats(grown), inference.prefill(split, prompts, policy=large, **options)
        assert held.pool_pages > first
        np.testing.assert_array_equal(held.entries, caches.stats(room).entries)
        if not shape:
            pages_are_whole(grown)
        questions = [prompt[:30] for prompt in prompts]
        told = [
            inference.generate(split, questions, sampling, policy=policy, cache=cache)
            for policy, cache in ((small, grown), (large, room))
        ]
    np.testing.assert_array_equal(told[0].tokens, told[1].tokens)
    np.testing.assert_array_equal(told[0].stats.entries, told[1].stats.entries)


@pytest.mark.thorough
def test_a_pool_is_halved_while_less_was_admitted_than_expected(prompts, monkeypatch):
    """And what is said is the same; a small one, and one of stated size, stay."""
    model, sampling = tiny_model(), SamplingParams(max_new_tokens=20, ignore_eos=True)
    policy = admitting(model, 1.0, tau=0.9)
    options = {"policy": policy, "page_size": PAGE}
    stays = caches.stats(inference.prefill(model, prompts, **options))
    monkeypatch.setattr(caches.sizes, "SMALL_POOL", 0)
    with jax.set_mesh(make_mesh()):
        first = caches.stats(new_cache(model, policy.compile(model), prompts, 0, PAGE, None)).pool_pages
    assert stays.pool_pages >= first
    small = inference.prefill(model, prompts, **options)
    held = caches.stats(small)
    assert held.pool_pages in (first // 2, first // 4, first // 8)
    assert held.pages <= held.pool_pages < 2 * held.pages + 8 * len(prompts)
    np.testing.assert_array_equal(held.entries, stays.entries)
    pages_are_whole(small)
    stated = inference.prefill(model, prompts, capacity=max(LENGTHS), **options)
    assert caches.stats(stated).pool_pages > held.pool_pages
    told = inference.generate(model, prompts, sampling, **options)
    fixed = inference.generate(model, prompts, sampling, capacity=max(LENGTHS) + 20, **options)
    np.testing.assert_array_equal(told.tokens, fixed.tokens)


@pytest.mark.parametrize("window", [100, *(pytest.param(x, marks=pytest.mark.thorough) for x in (1, 300))])
def test_a_pool_follows_each_sequence(model, monkeypatch, window):
    """And not the longest one, however often, nor the window of a policy."""
    monkeypatch.setattr(caches.sizes, "SMALL_POOL", 0)
    policy = make_policy("full") if window == 1 else make_policy({"streaming_llm": {"window": window}})
    lengths = [400, *[40] * 7]
    cache = inference.prefill(model, [np.arange(length) % 61 for length in lengths], policy=policy)
    sizes = caches.stats(cache)
    assert sizes.bytes <= 1.2 * sizes.full_bytes
    assert sizes.pages <= sizes.pool_pages == cache.pages.pool.shape[0]
    if window == 1:
        assert sizes.full_bytes <= sizes.bytes


def test_what_no_device_could_hold_is_refused(model):
    with pytest.raises(UserError, match=r"of up to 2000000002 tokens, .* GiB free; \d+ tokens would fit"):
        inference.generate(model, [[1, 2]], SamplingParams(max_new_tokens=2_000_000_000))


def test_the_largest_length_that_a_refusal_names_fits(model, monkeypatch):
    monkeypatch.setattr(caches, "device_bytes", lambda **_: 10**6)
    policy = make_policy("full")
    with pytest.raises(UserError) as error:
        inference.generate(model, [np.arange(50)] * 2, SamplingParams(max_new_tokens=10**5), policy=policy)
    named = int(str(error.value).split()[-4])
    inference.prefill(model, [np.arange(50)] * 2, max_new_tokens=named - 50)
    with pytest.raises(UserError, match=f"{named} tokens would fit"):
        inference.prefill(model, [np.arange(50)] * 2, max_new_tokens=named - 49)


def test_a_copy_that_no_device_has_the_memory_for_is_refused(model, monkeypatch):
    """Of a cache that is continued, and of what its branches copy of it; what is free beyond that is taken."""
    policy = make_policy("h2o:entries=60,when=every,every=8", model=model)
    cache = inference.prefill(model, [np.arange(50)], policy=policy, page_size=PAGE)
    pool = cache.pages.pool.shape[0]
    page_bytes = cache.pages.nbytes // pool

    def asked(share, pages):
        monkeypatch.setattr(caches, "device_bytes", lambda **_: page_bytes * pages)
        branches = branched(cache, True, 1, 4)[0] if share else cache
        return with_room(branches, policy, 200, 2).pages.pool.shape[0]

    with use_mesh(model):
        # of each of 12 rows: 13 pages of 4 tokens, all of which may be written to
        for share, least in ((False, pool), (True, 4 * 12 * 13)):
            assert [asked(share, pages) for pages in (least, least + 1)] == [least, least + 1]
            with pytest.raises(
                caches.CapacityError, match="is copied, .* MiB on a device that has .* MiB free"
            ):
                asked(share, least - 1)
    with pytest.raises(caches.CapacityError, match="is copied") as error:
        inference.generate(model, [[1, 2]] * 4, policy=policy, cache=cache, share=True)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "named",
    [
        "snapkv:ratio=0.5,pyramidkv",
        *(pytest.param(f"snapkv:ratio=0.5{x}", marks=pytest.mark.thorough) for x in ("", ",adakv")),
    ],
)
def test_short_prompts_are_kept_whole(model, named):
    """Beside a long one that is not."""
    policy = make_policy(named)
    sizes = caches.stats(inference.prefill(model, [np.arange(200) % 61, np.arange(5)], policy=policy))
    assert sizes.entries.mean((0, 2)).tolist() == pytest.approx([100, 5], abs=1)


@pytest.mark.parametrize(
    "capacity", [3, *(pytest.param(x, marks=pytest.mark.thorough) for x in ("20KB", "1%"))]
)
def test_a_capacity_below_the_windows_is_refused_with_one_that_holds_every_token(
    model, prompts, monkeypatch, capacity
):
    monkeypatch.setattr(caches.sizes, "device_bytes", lambda **_: 10**6)
    policy = make_policy("streaming_llm:sink=60,window=20")
    with pytest.raises(caches.CapacityError, match="that the windows of") as error:
        inference.prefill(model, prompts, policy=policy, capacity=capacity)
    enough = caches.parse_capacity(str(error.value).split("; ")[1].split()[0])
    assert type(enough) is type(capacity)
    cache = inference.prefill(model, prompts, policy=policy, capacity=enough)
    np.testing.assert_array_equal(caches.stats(cache).entries[0, :, 0], np.minimum(LENGTHS, 60 + 19))
