"""Answers, greedy and drawn, against logits and probabilities; many questions over one context."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax.inference.sampling as sampling
from kvjax import cache as caches
from kvjax.builtin import builtin_model
from kvjax.errors import UserError
from kvjax.inference.draw import Draw, draw_token
from kvjax.inference.forward import last_logits
from kvjax.inference.stop import settled, stop_place, stop_texts
from kvjax.mesh import make_mesh, use_mesh
from kvjax.models import load
from kvjax.policies import Adaptive, Entries, Policy, SnapKV
from tests.tiny_models import policies_for, tiny_model


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


@pytest.mark.parametrize("top_p", [1e-300, 5e-324, 1e-45, 1e-39, 1.17e-38, 1e-38, 1e-30])
def test_a_tiny_top_p_takes_the_most_likely_token(top_p):
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((4, 61)), jnp.float32)
    with use_mesh():
        for more in ({}, {"min_p": top_p}, {"temperature": 1e-6, "top_k": 61}):
            draw = Draw(**{"temperature": 1.0, "top_p": top_p} | more)
            found = jax.jit(draw_token, static_argnums=3)(logits, draw, jax.random.key(3), False)
            np.testing.assert_array_equal(found, logits.argmax(-1))


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


def test_min_p_keeps_what_is_likely_enough():
    p = np.array([0.5, 0.25, 0.15, 0.1])
    with use_mesh():
        draw = sampling.Draw(temperature=1.0, min_p=0.29)
        many = jnp.broadcast_to(jnp.log(p), (20000, 4))
        found = np.bincount(sampling._first_draw(many, draw, jax.random.key(0), False), minlength=4) / 20000
    np.testing.assert_allclose(found, np.array([0.5, 0.25, 0.15, 0]) / 0.9, atol=0.015)


def test_log_probabilities_are_the_model_s_own(model, tokens):
    prompts = [tokens[0, :9], tokens[1, :4]]
    draw = {"temperature": 1.5, "top_k": 9, "key": jax.random.key(0), "eos": (), "block": 3}
    out = sampling.sample(model, prompts, max_new_tokens=7, logprobs=True, **draw)
    plain = sampling.sample(model, prompts, max_new_tokens=7, **draw)
    assert plain.logprobs is None
    np.testing.assert_array_equal(np.stack(out.tokens), np.stack(plain.tokens))
    for prompt, new, own in zip(prompts, out.tokens, out.logprobs, strict=True):
        after = sampling.logits(model, [np.concatenate([prompt, new])])[0]
        want = jax.nn.log_softmax(after[len(prompt) - 1 : -1])[np.arange(7), new]
        np.testing.assert_allclose(own, want, atol=2e-5)
        assert own.dtype == np.float32


def test_samples_are_the_prompt_repeated_in_order(model, tokens):
    prompts = [tokens[0, :9], tokens[1, :9]]
    draw = {"temperature": 1.5, "key": jax.random.key(0), "eos": (), "max_new_tokens": 5}
    out = sampling.sample(model, prompts, samples=3, **draw).tokens
    np.testing.assert_array_equal(out, sampling.sample(model, np.repeat(prompts, 3, 0), **draw).tokens)
    assert len({line.tobytes() for line in out}) == 6
    for refused in ({"temperature": 0.0}, {"cache": sampling.prefill(model, prompts)}):
        with pytest.raises(UserError, match="samples=3"):
            sampling.sample(model, prompts, samples=3, **draw | refused)


@pytest.mark.thorough
def test_an_answer_with_a_key_of_its_own_is_the_same_in_any_batch(model, tokens):
    prompts, keys = [tokens[0, :9], tokens[1, :4], tokens[1, 2:9]], jax.random.split(jax.random.key(5), 3)
    draw = {"temperature": 1.5, "top_k": 20, "eos": (), "max_new_tokens": 6, "block": 4}
    together = sampling.sample(model, prompts, key=keys, **draw).tokens
    for order in ([2, 0], [1]):
        some = sampling.sample(model, [prompts[i] for i in order], key=keys[np.array(order)], **draw).tokens
        np.testing.assert_array_equal(some, [together[i] for i in order])
    with jax.set_mesh(make_mesh(fsdp=2)):
        meshed = sampling.sample(tiny_model(), prompts, key=keys, **draw).tokens
    np.testing.assert_array_equal(meshed, together)
    twice = sampling.sample(model, prompts[:1], samples=2, key=keys[:2], **draw).tokens
    np.testing.assert_array_equal(twice[0], together[0])
    assert not np.array_equal(*twice)
    with pytest.raises(
        UserError, match=r"one for each answer, of which there are 3, got keys of shape \(2,\)"
    ):
        sampling.sample(model, prompts, key=keys[:2], **draw)


def test_prompts_of_about_one_length_share_programs(model):
    """Also where they end at another number of pages, and whatever the method is called."""
    programs = last_logits, sampling.decode_block
    counts = []
    for length, eviction in ((101, SnapKV(8)), (98, SnapKV(8)), (99, Adaptive(SnapKV(8), over="head"))):
        policy = Policy(eviction=eviction, budget=Entries(40))
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


def test_a_stop_text_ends_an_answer_before_it(loaded):
    model, tokenizer = loaded
    given = {"tokenizer": tokenizer, "max_new_tokens": 24, "block": 4, "eos": ()}
    free = sampling.sample(model, ["def main(", "import os\n"], logprobs=True, **given)
    text = free.texts[0]
    stop = next(text[i : i + 3] for i in range(4, len(text)) if text.find(text[i : i + 3]) == i)
    assert stop not in free.texts[1]
    out = sampling.sample(model, ["def main(", "import os\n"], stop=["never", stop], logprobs=True, **given)
    assert out.stop_reasons == ["stop", "length"]
    assert out.texts == [text[: text.find(stop)], free.texts[1]]
    count = out.tokens[0].size
    np.testing.assert_array_equal(out.tokens[0], free.tokens[0][:count])
    np.testing.assert_array_equal(out.logprobs[0], free.logprobs[0][:count])
    assert text[: text.find(stop)].startswith(tokenizer.decode(out.tokens[0]))
    assert not text[: text.find(stop)].startswith(tokenizer.decode(free.tokens[0][: count + 1]))
    # not all of it was made
    assert out.stats.tokens[0] < out.stats.tokens[1]


def test_a_stop_text_that_is_a_token_is_a_stop_token(loaded):
    model, tokenizer = loaded
    ids = stop_texts(["<|copy|>", "x"], tokenizer)
    assert ids == (("x",), (tokenizer.convert_tokens_to_ids("<|copy|>"),))
    for stop, says in (("x", "a list of texts, got 'x'"), ([3], r"got \[3\]"), ([""], "got")):
        with pytest.raises(UserError, match=says):
            stop_texts(stop, tokenizer)
    with pytest.raises(UserError, match="needs tokenizer="):
        sampling.sample(model, [[1]], stop=["x"])


def test_what_may_begin_a_stop_text_is_not_settled():
    assert settled("a line\n", ["\n\n", "END"]) == 6
    assert settled("a line E", ["\n\n", "END"]) == 7
    assert settled("a line", ["\n\n", "END"]) == 6
    assert stop_place("x END y\n\n", ["\n\n", "END"]) == 2
