"""How large a pool is: by default, after a compaction, and for an answer to come."""

import jax
import numpy as np
import pytest

import kvjax.inference.sampling as sampling
from kvjax import cache as caches
from kvjax.mesh import make_mesh
from kvjax.policies import make_policy
from tests.inference.counting import START, admitted, counting
from tests.policies.captured import LENGTHS, PAGE, pages_are_whole, unnormed
from tests.tiny_models import tiny_model


@pytest.fixture(scope="module")
def model():
    return unnormed()


def test_the_default_pool_follows_the_policy_not_the_context(model):
    prompt = [np.zeros(600, np.int64)]
    policy = make_policy("random", model=model, ratio=0.1, window=8)
    sizes = caches.stats(sampling.prefill(model, prompt, policy=policy))
    assert sizes.bytes < 0.25 * sizes.full_bytes
    full = caches.stats(sampling.prefill(model, prompt))
    assert full.kv_ratio == 1
    assert full.full_bytes <= full.bytes <= 1.05 * full.full_bytes


def test_the_default_pool_holds_what_chance_admits(model):
    """Rows differ from their mean, on short prompts by a page; and nothing at all may be kept."""
    prompt = [np.arange(25)]
    for seed in range(8):
        policy = make_policy("random", model=model, ratio=0.5, window=1, seed=seed)
        assert caches.stats(sampling.prefill(model, prompt, policy=policy)).kv_ratio < 0.8
    nothing = make_policy("streaming_llm", model=model, sink=0, window=1)
    assert caches.stats(sampling.prefill(model, prompt, policy=nothing)).entries.sum() == 0


def test_the_pool_shrinks_to_what_stayed(model, prompts):
    """With room for what was announced, and none of it lost: the answer is that of a cache of stated size."""
    options = {"policy": make_policy("keydiff", model=model, ratio=0.25), "page_size": PAGE}
    small = sampling.prefill(model, prompts, **options)
    pages_are_whole(small)
    assert small.pages.pool.shape[0] == caches.rounded_up(caches.stats(small).pages)
    assert (
        caches.stats(small).bytes
        < 0.35 * caches.stats(sampling.prefill(model, prompts, page_size=PAGE)).bytes
    )
    more = {"max_new_tokens": 9, "eos": ()}
    fixed = sampling.sample(model, prompts, capacity=max(LENGTHS) + 12, **options, **more)
    grown = sampling.sample(model, prompts, **options, **more)
    np.testing.assert_array_equal(grown.tokens, fixed.tokens)
    assert grown.stats.bytes < fixed.stats.bytes


def test_freed_pages_are_used_again(model, prompts):
    """The question and the answer fit into what the evicted entries left."""
    policy = make_policy("keydiff", model=model, ratio=0.25)
    cache = sampling.prefill(model, prompts, policy=policy, page_size=PAGE, capacity=max(LENGTHS))
    questions = [prompt[:9] for prompt in prompts]
    out = sampling.sample(model, questions, policy=policy, cache=cache, max_new_tokens=8, eos=())
    assert out.stats.bytes == cache.pages.pool.nbytes
    assert [len(x) for x in out.tokens] == [8, 8]


@pytest.mark.parametrize("shape", [{}, {"fsdp": 2, "tensor": 2}, {"fsdp": 2, "tensor": 4}], ids=str)
def test_a_memory_begins_with_the_numbers_of_its_layer_and_heads(prompts, shape):
    """A table by head and a number for all, read by `init`: in a prompt, in its chunks and where a cache goes on."""
    question, window = np.arange(9), 6
    with jax.set_mesh(make_mesh(**shape)):
        split, policy = tiny_model(qk_norm=False), counting(window=window)
        for chunk in (max(LENGTHS), 16):
            cache = sampling.prefill(split, prompts, policy=policy, chunk=chunk, page_size=PAGE)
            counts, lengths = np.asarray(cache.layers.state.admission), np.asarray(cache.layers.length)
            for b, length in enumerate(LENGTHS):
                np.testing.assert_array_equal(counts[:, b], START + 2 + length)
                np.testing.assert_array_equal(lengths[:, b], admitted(length, window=window))
        out = sampling.sample(split, [question] * 2, policy=policy, cache=cache, max_new_tokens=4, eos=())
    # of the last token that was said, nothing is stored
    held = np.stack([admitted(length + 9 + 3, window=window) for length in LENGTHS], 1)
    np.testing.assert_array_equal(out.stats.entries, held + window - 1)
    lines = [np.concatenate([prompt, question]) for prompt in prompts]
    alone = sampling.sample(unnormed(), lines, policy=counting(window=window), max_new_tokens=4, eos=())
    np.testing.assert_array_equal(out.tokens, alone.tokens)
