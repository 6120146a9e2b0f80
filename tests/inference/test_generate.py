"""Tests of greedy and sampled answers against logits and probabilities, and of many questions over one context."""

import dataclasses

import jax
import numpy as np
import pytest

from kvjax import cache as caches
from kvjax import inference
from kvjax.builtin import builtin_model
from kvjax.errors import UserError
from kvjax.inference.answers import LiveText, decoded, final_length, stop_place, stop_tokens_of
from kvjax.inference.decode import decode_block
from kvjax.inference.forward import last_logits
from kvjax.mesh import make_mesh
from kvjax.models import load
from kvjax.policies import Adaptive, Entries, Policy, Schedule, SnapKV
from kvjax.sampling_params import SamplingParams
from tests.tasks.model_tokenizers import byte_tokenizer, smol_tokenizer, spaced_tokenizer
from tests.tiny_models import policies_for, tiny_model


def logits_of(model, prompts, answers):
    """Return the logits that follow each prompt and each token of its answer but the last."""
    lines = [np.concatenate(pair) for pair in zip(prompts, answers, strict=True)]
    after = inference.logits(model, [np.pad(line, (0, 16 - line.size)) for line in lines])
    return [
        row[len(prompt) - 1 : len(line) - 1] for row, prompt, line in zip(after, prompts, lines, strict=True)
    ]


def test_sampling_greedily_is_the_argmax_of_the_logits(model, tokens):
    prompts = [tokens[0, :9], tokens[1, :4]]
    out = inference.generate(model, prompts, SamplingParams(max_new_tokens=7, ignore_eos=True), block=4)
    assert out.finish_reasons == ["length", "length"]
    for after, new in zip(logits_of(model, prompts, out.tokens), out.tokens, strict=True):
        np.testing.assert_array_equal(after.argmax(-1), new)


def test_a_cache_serves_many_questions(model, tokens):
    policy = policies_for(model, 6)["wgkv"]
    context, questions = tokens[:, :20], [tokens[:, 20:24], tokens[:, 30:38]]
    stated = {"policy": policy, "chunk": 8}
    cache = inference.prefill(model, context, **stated)
    before = caches.stats(cache)
    for question in questions * 2:
        got = inference.generate(
            model, question, SamplingParams(max_new_tokens=5, ignore_eos=True), policy=policy, cache=cache
        )
        line = np.concatenate([context, question], 1)
        want = inference.generate(model, line, SamplingParams(max_new_tokens=5, ignore_eos=True), **stated)
        np.testing.assert_array_equal(np.stack(got.tokens), np.stack(want.tokens))
        np.testing.assert_array_equal(got.stats.entries, want.stats.entries)
    after = caches.stats(cache)
    np.testing.assert_array_equal(before.entries, after.entries)
    assert before.bytes == after.bytes


def test_stop_tokens_end_an_answer(model, tokens):
    sampling = SamplingParams(max_new_tokens=13, ignore_eos=True)
    free = inference.generate(model, tokens[:, :12], sampling, block=4)
    stop = int(free.tokens[0][4])
    first = int(np.flatnonzero(free.tokens[0] == stop)[0])
    sampling = dataclasses.replace(sampling, stop_token_ids=(stop, 60))
    out = inference.generate(model, tokens[:, :12], sampling, block=4)
    np.testing.assert_array_equal(out.tokens[0], free.tokens[0][:first])
    assert out.finish_reasons[0] == "stop"
    assert out.stats.tokens[0] == 12 + first


def test_sampling_depends_on_its_seed_and_respects_top_k_and_top_p(model, tokens):
    def drawn(block=4, **more):
        sampling = SamplingParams(max_new_tokens=5, temperature=1.5, ignore_eos=True, **more)
        return inference.generate(model, tokens[:, :10], sampling, block=block).tokens

    one, again, other = (drawn(seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other)
    np.testing.assert_array_equal(one, drawn(block=2))
    sampling = SamplingParams(max_new_tokens=5, ignore_eos=True)
    greedy = inference.generate(model, tokens[:, :10], sampling, block=4).tokens
    for limit in ({"top_k": 1}, {"top_p": 1e-6}):
        np.testing.assert_array_equal(drawn(seed=3, **limit), greedy)


def test_log_probabilities_are_those_of_the_model(model, tokens):
    prompts = [tokens[0, :9], tokens[1, :4]]
    drawing = {"max_new_tokens": 7, "temperature": 1.5, "top_k": 9, "ignore_eos": True}
    out = inference.generate(model, prompts, SamplingParams(**drawing, logprobs=2), block=4)
    plain = inference.generate(model, prompts, SamplingParams(**drawing), block=4)
    assert plain.logprobs is None
    np.testing.assert_array_equal(np.stack(out.tokens), np.stack(plain.tokens))
    for after, new, own in zip(logits_of(model, prompts, out.tokens), out.tokens, out.logprobs, strict=True):
        every = np.log(np.exp(after) / np.exp(after).sum(-1, keepdims=True))
        np.testing.assert_allclose(own.chosen, every[np.arange(7), new], atol=2e-5)
        assert own.chosen.dtype == np.float32
        for place, likely in zip(every, own.alternatives, strict=True):
            assert list(likely) == np.argsort(-place)[:2].tolist()
            np.testing.assert_allclose(list(likely.values()), -np.sort(-place)[:2], atol=2e-5)


def test_n_answers_differ_and_follow_their_prompt_s_order(model, tokens):
    prompts = [tokens[0, :9], tokens[1, :9]]
    sampling = SamplingParams(max_new_tokens=5, temperature=1.5, n=2, ignore_eos=True)
    out = inference.generate(model, prompts, sampling)
    assert out.prompts == [0, 0, 1, 1]
    assert not np.array_equal(*out.tokens[:2])
    for place, prompt in enumerate(prompts):
        alone = inference.generate(model, [prompt], sampling)
        np.testing.assert_array_equal(out.tokens[2 * place : 2 * place + 2], alone.tokens)
    # the first of several answers is the only one of n=1
    one = inference.generate(model, prompts, dataclasses.replace(sampling, n=1))
    np.testing.assert_array_equal(one.tokens, out.tokens[::2])
    with pytest.raises(UserError, match="give share=True"):
        inference.generate(model, prompts, sampling, cache=inference.prefill(model, prompts))


EACH = [
    SamplingParams(max_new_tokens=5, temperature=1.5, top_k=20, seed=5, ignore_eos=True),
    SamplingParams(max_new_tokens=3, ignore_eos=True, repetition_penalty=1.5),
    SamplingParams(max_new_tokens=5, temperature=0.7, n=2, ignore_eos=True, logit_bias={7: 3.0}),
]
"""Sampling parameters of three prompts, which have four answers in all."""


def three_prompts(tokens):
    return [tokens[0, :9], tokens[1, :4], tokens[1, 2:9]]


@pytest.mark.slow
def test_sampling_parameters_are_per_prompt_and_independent_of_the_batch(model, tokens):
    prompts = three_prompts(tokens)
    found = inference.generate(model, prompts, EACH, block=4)
    assert [line.size for line in found.tokens] == [5, 3, 5, 5]
    assert found.prompts == [0, 1, 2, 2]
    alone = [
        line
        for prompt, own in zip(prompts, EACH, strict=True)
        for line in inference.generate(model, [prompt], own, block=4).tokens
    ]
    for one, other in zip(found.tokens, alone, strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(UserError, match="one SamplingParams or one for each of 3 prompts"):
        inference.generate(model, prompts, EACH[:2])


@pytest.mark.mesh
def test_a_mesh_draws_the_same_tokens(model, tokens):
    found = inference.generate(model, three_prompts(tokens), EACH, block=4).tokens
    with jax.set_mesh(make_mesh(fsdp=2)):
        split = tiny_model(qk_norm=False)
        meshed = inference.generate(split, three_prompts(tokens), EACH, block=4).tokens
    for one, other in zip(found, meshed, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_prompts_of_similar_lengths_share_programs(model):
    """This holds if they end at another number of pages, and if the method has another name."""
    programs = last_logits, decode_block
    counts = []
    for length, eviction in ((101, SnapKV(8)), (98, SnapKV(8)), (99, Adaptive(SnapKV(8), over="head"))):
        policy = Policy(eviction=eviction, schedule=Schedule(Entries(40)))
        inference.generate(
            model,
            [np.arange(length) % 61],
            SamplingParams(max_new_tokens=3, ignore_eos=True),
            policy=policy,
            page_size=2,
        )
        counts.append([program._cache_size() for program in programs])
    assert counts[0] == counts[1] == counts[2]


@pytest.fixture(scope="module")
def loaded():
    return load(builtin_model("test_model"))


def test_texts_give_texts(loaded):
    model, tokenizer = loaded
    texts = ["def main(", "import os\n"]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    want = inference.generate(model, ids, SamplingParams(max_new_tokens=5))
    assert want.texts is None
    got = inference.generate(model, texts, SamplingParams(max_new_tokens=5), tokenizer=tokenizer)
    for line, text, expected in zip(got.tokens, got.texts, want.tokens, strict=True):
        np.testing.assert_array_equal(line, expected)
        assert text == tokenizer.decode(expected, skip_special_tokens=True)
    cache = inference.prefill(model, texts, tokenizer=tokenizer)
    continued = inference.generate(
        model, ["x", "y"], SamplingParams(max_new_tokens=5), tokenizer=tokenizer, cache=cache
    )
    more = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in "xy"]
    joined = inference.generate(
        model, [a + b for a, b in zip(ids, more, strict=True)], SamplingParams(max_new_tokens=5)
    )
    np.testing.assert_array_equal(np.stack(continued.tokens), np.stack(joined.tokens))


def test_a_stop_text_ends_an_answer_before_it(loaded):
    model, tokenizer = loaded
    given = {"tokenizer": tokenizer, "block": 4}
    sampling = SamplingParams(max_new_tokens=24, ignore_eos=True, logprobs=0)
    free = inference.generate(model, ["def main(", "import os\n"], sampling, **given)
    text = free.texts[0]
    stop = next(text[i : i + 3] for i in range(4, len(text)) if text.find(text[i : i + 3]) == i)
    assert stop not in free.texts[1]
    out = inference.generate(
        model, ["def main(", "import os\n"], dataclasses.replace(sampling, stop=("never", stop)), **given
    )
    assert out.finish_reasons == ["stop", "length"]
    assert out.texts == [text[: text.find(stop)], free.texts[1]]
    count = out.tokens[0].size
    np.testing.assert_array_equal(out.tokens[0], free.tokens[0][:count])
    np.testing.assert_array_equal(out.logprobs[0].chosen, free.logprobs[0].chosen[:count])
    assert text[: text.find(stop)].startswith(tokenizer.decode(out.tokens[0]))
    assert not text[: text.find(stop)].startswith(tokenizer.decode(free.tokens[0][: count + 1]))
    # the stopped answer was not generated to its full length
    assert out.stats.tokens[0] < out.stats.tokens[1]


def test_a_stop_text_that_is_a_token_is_a_stop_token(loaded):
    model, tokenizer = loaded
    ids = stop_tokens_of(["<|copy|>", "x"], tokenizer)
    assert ids == (("x",), (tokenizer.convert_tokens_to_ids("<|copy|>"),))
    with pytest.raises(UserError, match="needs a tokenizer"):
        inference.generate(model, [[1]], SamplingParams(stop=["x"]))


def test_the_possible_beginning_of_a_stop_text_is_not_shown():
    assert final_length("a line\n", ["\n\n", "END"]) == 6
    assert final_length("a line E", ["\n\n", "END"]) == 7
    assert final_length("a line", ["\n\n", "END"]) == 6
    assert stop_place("x END y\n\n", ["\n\n", "END"]) == 2


TEXT = "He said: “it’s 3.5 € – no 🙂🙂, really”.\n\n  Then  he left 👩‍👩‍👧. The end , you see ."


@pytest.mark.parametrize("make", [byte_tokenizer, smol_tokenizer, spaced_tokenizer])
@pytest.mark.parametrize("stop", [(), ("🙂, r",), ("left", "\n\n\n")])
def test_live_text_adds_up_to_the_whole_answer(make, stop):
    tokenizer, rng = make(), np.random.default_rng(0)
    tokens = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    text = decoded(tokenizer, tokens)
    place = stop_place(text, stop)
    for _ in range(20):
        live, parts, start = LiveText(tokenizer, stop), [], 0
        while start < len(tokens):
            size = int(rng.integers(1, 9))
            parts.append(live.more(tokens[start : start + size]))
            start += size
        assert "".join([*parts, live.end()]) == text[:place]
        assert live.stopped == (place is not None)


def test_live_text_does_not_decode_a_long_answer_again_for_every_part():
    class Counting:
        decoded = 0

        def decode(self, tokens, **_):
            self.decoded += len(tokens)
            return "x" * len(tokens)

    tokenizer = Counting()
    live = LiveText(tokenizer, ())
    for _ in range(1000):
        live.more([1] * 8)
    assert tokenizer.decoded < 4 * 8000
