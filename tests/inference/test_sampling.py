"""Answers, greedy and drawn, against logits and probabilities; many questions over one context."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax.inference.sampling as sampling
from kvjax import cache as caches
from kvjax.builtin import builtin_model
from kvjax.inference.forward import last_logits
from kvjax.mesh import use_mesh
from kvjax.models import load
from kvjax.policies import make_policy
from tests.tiny_models import policies_for


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
        draw = sampling.Draw(temperature=1.0, top_p=0.8, top_k=0)
        many = jnp.broadcast_to(jnp.log(p), (20000, 4))
        found = np.bincount(sampling._first_draw(many, draw, jax.random.key(0), False), minlength=4) / 20000
    np.testing.assert_allclose(found, np.array([0.5, 0.25, 0.15, 0]) / 0.9, atol=0.015)


def test_prompts_of_about_one_length_share_programs(model):
    """Also where they end at another number of pages, and whatever the method is called."""
    programs = last_logits, sampling.decode_block
    counts = []
    for length, name in ((101, "snapkv"), (98, "snapkv"), (99, "adakv")):
        policy = make_policy(name, model=model, entries=40, observed=8, over="head")
        sampling.sample(model, [np.arange(length) % 61], policy=policy, page_size=2, max_new_tokens=3, eos=())
        counts.append([program._cache_size() for program in programs])
    assert counts[0] == counts[1] == counts[2]


@pytest.fixture(scope="module")
def loaded():
    return load(builtin_model("test_model"))


def test_text_in_and_text_out(loaded):
    model, tokenizer = loaded
    texts = ["def main(", "import os\n"]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    want = sampling.sample(model, ids, max_new_tokens=6)
    assert want.texts is None
    got = sampling.sample(model, texts, tokenizer=tokenizer, max_new_tokens=6)
    for line, text, expected in zip(got.tokens, got.texts, want.tokens, strict=True):
        np.testing.assert_array_equal(line, expected)
        assert text == tokenizer.decode(expected, skip_special_tokens=True)
    cache = sampling.prefill(model, texts, tokenizer=tokenizer)
    asked = sampling.sample(model, ["x", "y"], tokenizer=tokenizer, cache=cache, max_new_tokens=6)
    more = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in "xy"]
    whole = sampling.sample(model, [a + b for a, b in zip(ids, more, strict=True)], max_new_tokens=6)
    np.testing.assert_array_equal(np.stack(asked.tokens), np.stack(whole.tokens))
