"""Prefill, chunked prefill and decode against dense attention under the same visibility rule."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax.inference.sampling as sampling
from kvjax import cache as caches
from kvjax.cache import CapacityError
from kvjax.errors import UserError
from kvjax.inference.forward import last_logits
from kvjax.inference.room import empty_cache
from kvjax.mesh import make_mesh, use_mesh
from kvjax.policies import make_policy
from tests.inference.cached import LENGTH, cached_logits
from tests.inference.dense import dense_logits
from tests.tiny_models import policies_for, tiny_gates, tiny_model


@pytest.mark.parametrize(
    ("name", "window"),
    [
        ("full", 1),
        ("full", 6),
        pytest.param("streaming_llm", 6, marks=pytest.mark.thorough),
        pytest.param("head_pattern", 6, marks=pytest.mark.thorough),
        ("wgkv", 1),
        ("wgkv", 6),
    ],
)
def test_prefill_chunks_and_decode_see_exactly_the_window_and_what_was_kept(model, tokens, name, window):
    policy = policies_for(model, window)[name]
    want, kept = dense_logits(model, policy, tokens)
    once, cache = cached_logits(model, policy, tokens, [LENGTH])
    assert np.abs(once - want).max() < 1e-4
    left = kept.sum(-1)
    np.testing.assert_array_equal(np.asarray(cache.layers.length), left)
    mixed, cache = cached_logits(model, policy, tokens, [8] * 4 + [1] * 8, page_size=3)
    assert np.abs(mixed - want).max() < 1e-4
    np.testing.assert_array_equal(np.asarray(cache.layers.length), left)


def test_a_batch_equals_its_sequences_alone_and_padding_leaves_no_trace(model, tokens):
    """Lengths below, equal to and above the window, and one empty row."""
    policy = policies_for(model, 6)["wgkv"]
    batch, lengths = np.concatenate([tokens, tokens]), np.array([LENGTH, 6, 3, 0])
    padded = batch.copy()
    padded[np.arange(LENGTH) >= lengths[:, None]] = 60
    together, cache = cached_logits(model, policy, padded, [16, 24], lengths=lengths)
    for row in (1, 2):
        length = lengths[row]
        alone, own = cached_logits(model, policy, batch[row : row + 1, :length], [length])
        assert np.abs(together[row, :length] - alone[0]).max() < 1e-4
        np.testing.assert_array_equal(cache.layers.length[:, row], own.layers.length[:, 0])
    np.testing.assert_array_equal(cache.layers.length[:, 3], 0)
    sizes = caches.stats(cache)
    ring_rows, page = 3 * 4 * 4, 4
    pages = ring_rows * caches.ring_pages(6, page) + np.ceil(np.asarray(cache.layers.length) / page).sum()
    assert sizes.pages == pages
    np.testing.assert_array_equal(sizes.entries[0, :, 0] >= np.minimum(lengths, 5), True)


def test_a_mesh_gives_the_same(model, tokens):
    batch = np.concatenate([tokens, tokens[:, ::-1]])
    policy = policies_for(model, 6)["wgkv"]
    want, alone = cached_logits(model, policy, batch, [LENGTH - 2, 1, 1])
    with jax.set_mesh(make_mesh(fsdp=2, tensor=4)):
        split = tiny_model()
        got, cache = cached_logits(split, policies_for(split, 6)["wgkv"], batch, [LENGTH - 2, 1, 1])
    assert np.abs(got - want).max() < 1e-4
    np.testing.assert_array_equal(cache.layers.length, alone.layers.length)
    assert caches.stats(cache).pages == caches.stats(alone).pages


def test_attention_over_the_cache_needs_no_collective():
    """Attention and the cache's bookkeeping are local to a shard (design.md §5)."""
    with jax.set_mesh(make_mesh(tensor=4)):
        split = tiny_model()
        policy = policies_for(split, 6)["wgkv"]
        cache = empty_cache(
            policy, batch=1, layers=3, kv_heads=4, head_dim=8, tokens=64, dtype=jnp.float32, capacity=64
        )
        one = jnp.zeros((1, 1), jnp.int32)
        first = jax.tree.map(lambda a: a[0], (policy, cache.layers))
        step = jax.eval_shape(lambda: fake_step(one))
        lowered = jax.jit(attend_only).lower(first[0], cache.pages, first[1], step)
        text = str(lowered.compile().as_text())
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"):
        assert f" {collective}(" not in text


def fake_step(tokens):
    from kvjax.mesh import BATCH, P
    from kvjax.step import Step

    b, t = tokens.shape
    heads = P(BATCH, "tensor", None, None)
    kv, q = (jnp.zeros((b, n, t, 8), out_sharding=heads) for n in (4, 8))
    return Step(
        hidden=jnp.zeros((b, t, 32), out_sharding=P(BATCH, None, None)), q=q, k=kv, q_pre=q, k_pre=kv, v=kv,
        position=jnp.zeros((b, t), jnp.int32, out_sharding=P(BATCH, None)),
        layer=jnp.int32(0), head=jnp.zeros(4, jnp.int32, out_sharding=P("tensor")),
    )  # fmt: skip


def attend_only(policy, pages, layers, step):
    from kvjax.inference.attention import cached_attention
    from kvjax.mesh import BATCH, P

    rows = jnp.zeros(1, jnp.int32, out_sharding=P(BATCH))
    return cached_attention(policy, step, pages, layers, seen=rows, valid=rows + 1)


def test_sampling_greedily_is_the_argmax_of_the_logits(model, tokens):
    prompts = [tokens[0, :9], tokens[1, :4]]
    out = sampling.sample(model, prompts, max_new_tokens=7, block=3, eos=())
    assert out.stop_reasons == ["length", "length"]
    for prompt, new in zip(prompts, out.tokens, strict=True):
        line = np.concatenate([prompt, new])
        after = sampling.logits(model, [line])[0]
        np.testing.assert_array_equal(after[len(prompt) - 1 : -1].argmax(-1), new)


def test_a_cache_serves_many_questions(model, tokens):
    policy = policies_for(model, 6)["wgkv"]
    context, questions = tokens[:, :20], [tokens[:, 20:24], tokens[:, 30:38]]
    # calls of 8 and of 4 tokens, and one pool: few programs
    stated = {"policy": policy, "chunk": 8, "capacity": 40}
    cache = sampling.prefill(model, context, **stated)
    before = caches.stats(cache)
    for question in questions * 2:
        got = sampling.sample(model, question, policy=policy, cache=cache, max_new_tokens=5, eos=())
        line = np.concatenate([context, question], 1)
        want = sampling.sample(model, line, max_new_tokens=5, eos=(), **stated)
        np.testing.assert_array_equal(np.stack(got.tokens), np.stack(want.tokens))
        np.testing.assert_array_equal(got.stats.entries, want.stats.entries)
    after = caches.stats(cache)
    np.testing.assert_array_equal(before.entries, after.entries)
    assert before.bytes == after.bytes


def test_stop_tokens_end_a_row_and_write_nothing_more(model, tokens):
    free = sampling.sample(model, tokens[:, :12], max_new_tokens=13, eos=())
    stop = int(free.tokens[0][4])
    first = int(np.flatnonzero(free.tokens[0] == stop)[0])
    out = sampling.sample(model, tokens[:, :12], max_new_tokens=13, eos=(stop, 999), block=4)
    np.testing.assert_array_equal(out.tokens[0], free.tokens[0][:first])
    assert out.stop_reasons[0] == "eos"
    assert out.stats.tokens[0] == 12 + first


def test_drawing_repeats_with_its_key_and_respects_top_k_and_top_p(model, tokens):
    draw = dict(max_new_tokens=5, temperature=1.5, eos=())
    one, again, other = (
        sampling.sample(model, tokens[:, :10], key=jax.random.key(seed), **draw).tokens for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other)
    blocks = sampling.sample(model, tokens[:, :10], key=jax.random.key(0), block=2, **draw).tokens
    np.testing.assert_array_equal(one, blocks)
    greedy = sampling.sample(model, tokens[:, :10], max_new_tokens=5, eos=()).tokens
    for limit in ({"top_k": 1}, {"top_p": 1e-6}):
        np.testing.assert_array_equal(
            sampling.sample(model, tokens[:, :10], key=jax.random.key(3), **draw, **limit).tokens, greedy
        )


def test_draws_follow_the_distribution():
    """top_p keeps the fewest tokens that reach it; frequencies match the renormalised probabilities."""
    p = np.array([0.5, 0.25, 0.15, 0.1])
    with use_mesh():
        draw = sampling.Draw(temperature=1.0, top_p=0.8, top_k=0).arrays()
        many = jnp.broadcast_to(jnp.log(p), (20000, 4))
        found = np.bincount(sampling._first_draw(many, draw, jax.random.key(0), False), minlength=4) / 20000
    np.testing.assert_allclose(found, np.array([0.5, 0.25, 0.15, 0]) / 0.9, atol=0.015)


def test_memory_is_real(model):
    """With a quarter admitted, a third of the full cache's memory serves the prompt; the full policy is refused."""
    prompt = [np.random.default_rng(1).integers(0, 61, 600)]
    policy = make_policy("random", model=model, ratio=0.25, window=8)
    third = 600 // 3
    cache = sampling.prefill(model, prompt, policy=policy, capacity=third)
    sizes = caches.stats(cache)
    assert sizes.bytes <= sizes.full_bytes * 0.36
    assert 0.2 < sizes.kv_ratio < 0.32
    assert sum(a.nbytes for a in jax.live_arrays() if a.shape == cache.pages.pool.shape) == sizes.bytes
    with pytest.raises(CapacityError, match=r"policy full needs at least \d+ pages .* the pool has \d+"):
        sampling.prefill(model, prompt, capacity=third)
    with pytest.raises(CapacityError, match="policy full"):
        sampling.sample(model, [prompt[0][:190]], capacity=192, max_new_tokens=40, eos=())


def test_the_default_pool_follows_the_policy_not_the_context(model):
    prompt = [np.zeros(600, np.int64)]
    policy = make_policy("random", model=model, ratio=0.1, window=8)
    sizes = caches.stats(sampling.prefill(model, prompt, policy=policy))
    assert sizes.bytes < 0.25 * sizes.full_bytes
    full = caches.stats(sampling.prefill(model, prompt))
    assert full.kv_ratio == 1
    assert full.full_bytes <= full.bytes <= 1.05 * full.full_bytes


def test_prompts_of_about_one_length_share_programs(model):
    """Also where they end at another number of pages, and whatever the method is called."""
    programs = last_logits, sampling.decode_block
    counts = []
    for length, name in ((101, "snapkv"), (98, "snapkv"), (99, "adakv")):
        policy = make_policy(name, model=model, entries=40, observed=8, over="head")
        sampling.sample(model, [np.arange(length) % 61], policy=policy, page_size=2, max_new_tokens=3, eos=())
        counts.append([program._cache_size() for program in programs])
    assert counts[0] == counts[1] == counts[2]


def test_the_default_pool_holds_what_chance_admits(model):
    """Rows differ from their mean, on short prompts by a page; and nothing at all may be kept."""
    prompt = [np.arange(25)]
    for seed in range(8):
        policy = make_policy("random", model=model, ratio=0.5, window=1, seed=seed)
        assert caches.stats(sampling.prefill(model, prompt, policy=policy)).kv_ratio < 0.8
    nothing = make_policy("streaming_llm", model=model, sink=0, window=1)
    assert caches.stats(sampling.prefill(model, prompt, policy=nothing)).entries.sum() == 0


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda m: sampling.sample(m, []), "no prompt"),
        (lambda m: sampling.sample(m, [[]]), "prompt 0 is empty"),
        (lambda m: sampling.sample(m, [5, 6]), r"prompt 0 must be a list of whole token ids, got shape \(\)"),
        (lambda m: sampling.sample(m, [[0.5]]), "must be a list of whole token ids"),
        (lambda m: sampling.prefill(m, [[1]], capacity="nan%"), "expected a positive number"),
        (
            lambda m: sampling.sample(m, [[1]], cache=sampling.prefill(m, [[1]]), capacity=9),
            "capacity is stated where the cache is made",
        ),
        (
            lambda m: sampling.sample(m, [[1]], cache=sampling.prefill(tiny_model(num_layers=2), [[1]])),
            r"the cache is for \(layers, kv heads, head_dim\) = \(2, 4, 8\), the model has \(3, 4, 8\)",
        ),
        (lambda m: sampling.sample(m, ["text"]), "must be token ids"),
        (lambda m: sampling.sample(m, [[1, 61]]), r"token id 61, the model's vocabulary is 0 … 60"),
        (
            lambda m: sampling.sample(m, [[1]], max_new_tokens=0),
            "max_new_tokens must be a whole number of at least 1",
        ),
        (lambda m: sampling.sample(m, [[1]], temperature=1.0), "needs key"),
        (lambda m: sampling.sample(m, [[1]], top_p=0.0), "top_p"),
        (lambda m: sampling.prefill(m, [[1]], capacity="12 apples"), "capacity '12 apples'"),
        (lambda m: sampling.prefill(m, [[1]], capacity="-3GiB"), "positive number"),
        (lambda m: sampling.prefill(m, [[1]], page_size=0), "page_size must be a whole number of at least 1"),
        (
            lambda m: sampling.prefill(m, [[1]], policy=make_policy("full", window=50), capacity=20),
            "capacity 20: .* fewer than",
        ),
        (lambda m: sampling.logits(m, [[1], [1, 2]]), "one length"),
    ],
)
def test_mistakes_are_named_in_one_line(model, call, says):
    with pytest.raises(UserError, match=says) as caught:
        call(model)
    assert "\n" not in str(caught.value)


def test_the_capacity_that_an_error_names_is_enough(model):
    """For the prompt and for what is generated after it, though layers above those that ran out admit others."""
    prompt = [np.random.default_rng(3).integers(0, 61, 190)]
    policy = make_policy(
        "wgkv", model=model, gates=tiny_gates(model), tau=0.5, window=8, rate=np.full((3, 4), 0.01)
    )
    with pytest.raises(CapacityError) as error:
        sampling.sample(model, prompt, policy=policy, max_new_tokens=40, eos=())
    named = re.search(
        r"a capacity of (\d+) entries per kv head, which is enough for 40 more tokens", str(error.value)
    )
    assert named is not None
    found = sampling.sample(model, prompt, policy=policy, capacity=int(named[1]), max_new_tokens=40, eos=())
    assert found.tokens[0].size == 40
    assert int(named[1]) < 190 + 40
