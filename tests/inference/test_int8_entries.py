"""Tests of int8 entries: they are near the floats that they stand for, stay the same numbers wherever they are moved,
and take half the memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache as caches
from kvjax.cache.packed_entries import packed
from kvjax.engine import Engine
from kvjax.errors import UserError
from kvjax.inference import generate, prefill
from kvjax.inference.key_scale import key_scale
from kvjax.inference.saving import load_cache, save_cache
from kvjax.mesh import make_mesh, use_mesh
from kvjax.policies import make_policy
from kvjax.sampling_params import SamplingParams
from pallas_kernels.int8_entries import dequantised_entries, quantised_entries
from tests.inference.cached import cached_logits
from tests.inference.contexts import CONTEXTS, QUESTIONS, WITH_LOGPROBS, policies
from tests.inference.delayed import delayed
from tests.policies.captured import PAGE, pages_are_whole
from tests.tasks.model_tokenizers import byte_tokenizer
from tests.tiny_models import policies_for, tiny_model

pytestmark = pytest.mark.slow

CALLS = [8] * 4 + [1] * 8
NEAR = 0.1
"""Tolerance of logits, which are about 2 in the tiny model."""


def uneven(bias=10.0, **changes):
    """Return the tiny model with a component of its keys that is large in every token, as in Qwen2."""
    made = tiny_model(qk_norm=False, attention_bias=True, model_type="qwen2", **changes)
    own = {name: x.value for name, x in made.unfused_arrays().items()}
    own["layers.k_bias.value"] = own["layers.k_bias.value"].at[..., 3].set(bias)
    return made.with_unfused(own)


@pytest.fixture(scope="module")
def model():
    return uneven()


@pytest.fixture(scope="module")
def int8():
    made = uneven(kv_cache_dtype="int8")
    assert np.ptp(key_scale(made)) == 1
    return made


@pytest.mark.parametrize(
    "name", ["wgkv", "quest", *(pytest.param(x, marks=pytest.mark.thorough) for x in ("max_entries", "full"))]
)
def test_logits_are_close_to_those_of_float_entries(model, int8, tokens, name):
    results = []
    for loaded in (model, int8):
        named = policies_for(loaded, 6) | {"max_entries": delayed(window=6, max_entries=5, delay=2)}
        results.append(cached_logits(loaded, named[name], tokens, CALLS))
    (want, floats), (logits, cache) = results
    assert 0 < np.sqrt(np.square(logits - want).mean()) < NEAR
    # a gate may decide otherwise about a token whose hidden state is a little different
    np.testing.assert_allclose(cache.layers.length, floats.layers.length, atol=1)


@pytest.mark.parametrize(
    "name",
    [
        "h2o",
        *(pytest.param(x, marks=pytest.mark.thorough) for x in ("kvzip", "r_kv", "fast_kvzip", "snapkv")),
    ],
)
def test_evictions_score_the_stored_entries(model, int8, name):
    """Contexts are compacted, and so are answers as they grow."""
    results = []
    for loaded in (model, int8):
        texts = {"ratio": 0.5, "repeated": 16, "instruction": [3, 1], "resumption": [3, 2], "tail": [4]}
        policy = make_policy({"kvzip": texts}, model=loaded) if name == "kvzip" else policies(loaded)[name]()
        cache = prefill(loaded, CONTEXTS, policy=policy, page_size=PAGE, chunk=32)
        pages_are_whole(cache)
        answers = generate(loaded, QUESTIONS[:2], WITH_LOGPROBS, policy=policy, cache=cache)
        results.append(
            (np.asarray(cache.layers.length), [logprobs.chosen[0] for logprobs in answers.logprobs])
        )
    (lengths, first), (own_lengths, own_first) = results
    np.testing.assert_array_equal(own_lengths.sum((0, 2)), lengths.sum((0, 2)))
    # an entry at the edge of the budget may be another one
    np.testing.assert_allclose(own_lengths, lengths, atol=4)
    np.testing.assert_allclose(own_first, first, atol=3 * NEAR)


def test_h2o_counts_the_attention_to_int8_entries(model, int8):
    attention = []
    for loaded in (model, int8):
        policy = make_policy("h2o:entries=1000,when=every,every=8", model=loaded)
        cache = prefill(loaded, CONTEXTS, policy=policy, page_size=PAGE, chunk=32)
        with use_mesh(loaded):
            attention.append(packed(cache)["metadata.attention"])
    np.testing.assert_allclose(attention[1], attention[0], atol=NEAR)


def test_entries_are_rounded_only_once(int8, tokens):
    """Entries move from the window to the retained entries, in calls of many tokens and of one."""
    policy = policies_for(int8, 6)["full"]
    _, early = cached_logits(int8, policy, tokens[:, :20], [20])
    _, late = cached_logits(int8, policy, tokens, [20, 8, 8, 1, 1, 1, 1])
    with use_mesh(int8):
        early, late = packed(early), packed(late)
    before, after = (x["length"].reshape(-1) for x in (early, late))
    # position i is in slot i mod 5, and 20 tokens were read
    scales = early["numbers.scale"].reshape(len(before), 5)
    begin, kept = 0, 0
    for row, count in enumerate(before):
        stop, ring = begin + count, early["ring"].reshape(len(before), -1, 16)[row]
        own = late["entries"][kept : kept + after[row]]
        np.testing.assert_array_equal(own[:count], early["entries"][begin:stop])
        np.testing.assert_array_equal(own[count : count + 5], ring)
        own = late["metadata.scale"][kept : kept + after[row]]
        np.testing.assert_array_equal(own[:count], early["metadata.scale"][begin:stop])
        np.testing.assert_array_equal(own[count : count + 5], scales[row])
        begin, kept = stop, kept + after[row]


@pytest.mark.parametrize(
    "name", ["quest", *(pytest.param(x, marks=pytest.mark.thorough) for x in ("wgkv", "h2o"))]
)
def test_a_loaded_cache_gives_identical_answers(model, int8, name, tmp_path):
    policy = policies(int8)[name]()
    cache = prefill(int8, CONTEXTS, policy=policy, page_size=PAGE, chunk=32)
    save_cache(tmp_path, cache, int8, policy)
    loaded = load_cache(tmp_path, int8, policy)
    pages_are_whole(loaded)

    def asked(cache):
        found = generate(int8, QUESTIONS[:2], WITH_LOGPROBS, policy=policy, cache=cache)
        return found.tokens, [own.chosen for own in found.logprobs]

    np.testing.assert_array_equal(asked(loaded), asked(cache))
    with pytest.raises(UserError, match="saved with kv_cache_dtype int8, the model is loaded with None"):
        load_cache(tmp_path, model, policies(model)[name]())
    with pytest.raises(UserError, match="entries in int8, the model is loaded with kv_cache_dtype None"):
        save_cache(tmp_path, cache, model, policies(model)[name]())


@pytest.mark.parametrize(
    "policy",
    [
        "random:ratio=0.4,window=8",
        *(pytest.param(x, marks=pytest.mark.thorough) for x in ("full", "snapkv:ratio=0.5")),
    ],
)
def test_the_engine_gives_the_answers_of_generate(policy):
    tokenizer = byte_tokenizer()
    model = uneven(vocab_size=len(tokenizer), kv_cache_dtype="int8")
    made, sampling = make_policy(policy, model=model), SamplingParams(max_new_tokens=20, ignore_eos=True)
    sizes = {"slots": 2, "max_length": 128, "page_size": 4, "chunk": 16, "block": 4, "capacity": 128}
    engine = Engine(model, made, tokenizer=tokenizer, **sizes)
    with use_mesh(model):
        for row in (engine._pool.slots(), engine._pool.begin()):
            np.testing.assert_array_equal(row.layers.key_scale[:, 0], key_scale(model))
    prompts = [np.random.default_rng(seed).integers(0, 256, 30 + seed).tolist() for seed in range(3)]

    def run(requests):
        while engine.busy:
            engine.step()
        return [request.tokens for request in requests]

    together = run([request for prompt in prompts for request in engine.submit(prompt, sampling)])
    wanted = [
        generate(model, [prompt], sampling, policy=made, page_size=4, chunk=16).tokens[0].tolist()
        for prompt in prompts
    ]
    assert together == wanted


@pytest.mark.mesh
def test_a_mesh_gives_close_logits(int8, tokens):
    policy = policies_for(int8, 6)["wgkv"]
    want, alone = cached_logits(int8, policy, tokens, CALLS)
    scale = np.asarray(key_scale(int8))
    with jax.set_mesh(make_mesh(fsdp=2, tensor=4)):
        split = uneven(kv_cache_dtype="int8")
        got, cache = cached_logits(split, policies_for(split, 6)["wgkv"], tokens, CALLS)
        np.testing.assert_array_equal(key_scale(split), scale)
    assert np.abs(got - want).max() < NEAR
    np.testing.assert_array_equal(cache.layers.length, alone.layers.length)


def test_large_key_components_are_scaled(tokens):
    """The fourth component of the keys is large in every token, as in Qwen2."""
    floats, int8 = uneven(30.0), uneven(30.0, kv_cache_dtype="int8")
    c = np.asarray(key_scale(int8))
    np.testing.assert_array_equal(c, np.exp2(np.round(np.log2(c))))
    assert (c[..., 3] > c[..., :3].max(-1)).all()
    policy = policies_for(int8, 6)["full"]
    want, _ = cached_logits(floats, policy, tokens, CALLS)
    scaled, _ = cached_logits(int8, policy, tokens, CALLS)
    unscaled, _ = cached_logits(int8, policy, tokens, CALLS, scale=jnp.ones_like(c))
    assert np.abs(scaled - want).max() < np.abs(unscaled - want).max() / 3


def test_int8_entries_take_half_the_memory(int8):
    assert caches.entry_bytes(64, "bfloat16", int8=True) < 0.53 * caches.entry_bytes(
        64, "bfloat16", int8=False
    )
    cache = prefill(int8, CONTEXTS, page_size=PAGE, capacity="64KiB")
    np.testing.assert_array_equal(cache.layers.key_scale[:, 1], key_scale(int8))
    sizes = caches.stats(cache)
    assert sizes.bytes == sizes.pool_pages * PAGE * (2 * 8 + 4)
    assert cache.limit == 2**16 // (PAGE * (2 * 8 + 4))
    assert sizes.full_bytes == sum(map(len, CONTEXTS)) * 3 * 4 * 2 * 8 * 4


@pytest.mark.parametrize("dtype", ["fp8", "bfloat16"])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(UserError, match="kv_cache_dtype must be int8"):
        tiny_model(kv_cache_dtype=dtype)


def test_rounding_is_to_nearest_without_clipping():
    kv = jax.random.normal(jax.random.key(0), (50, 16)) * jnp.exp2(jnp.arange(-25, 25))[:, None]
    kv = kv.at[3].set(0).at[4, :8].set(0)
    values, packed_scales = quantised_entries(kv)
    assert values.dtype == jnp.int8
    assert jnp.abs(values.astype(int)).max() <= 127
    largest = jnp.abs(kv.reshape(50, 2, 8)).max(-1, keepdims=True)
    error = jnp.abs(dequantised_entries(values, packed_scales, jnp.float32) - kv).reshape(50, 2, 8)
    assert (error <= largest / 127 * (1 + 2**-7) / 2 * (1 + 1e-6)).all()
