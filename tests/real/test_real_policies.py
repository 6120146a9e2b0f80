"""Tests of policies with a real model: the entries they keep, and whether it still finds a needle in 2,048 tokens."""

from pathlib import Path

import numpy as np
import pytest

from kvjax import cache as caches
from kvjax.inference import generate, logits, prefill
from kvjax.models import load_model, save_model
from kvjax.policies import make_policy
from kvjax.sampling_params import SamplingParams
from kvjax.tasks import PromptEncoder
from kvjax.tasks.ruler import make_ruler_task

LENGTH = 2048


@pytest.fixture(scope="module")
def example(tokenizer):
    return make_ruler_task("niah_single_1", tokenizer).example(1, LENGTH)


@pytest.fixture(scope="module")
def prompt(tokenizer, example):
    return PromptEncoder(tokenizer)(example)


def answered(model, tokenizer, prompt, example, policy, *, with_question=False) -> tuple[float, caches.Stats]:
    """Return the answer's score and the cache's sizes. `with_question`: the question is read with the context."""
    question = prompt.questions[0].prompt
    if with_question:
        generation = generate(
            model,
            [np.concatenate([prompt.context, question])],
            SamplingParams(max_new_tokens=16),
            policy=policy,
            chunk=512,
        )
    else:
        cache = prefill(model, [prompt.context], policy=policy, chunk=512)
        generation = generate(
            model, [question], SamplingParams(max_new_tokens=16), policy=policy, cache=cache
        )
    return example.questions[0].score(tokenizer.decode(generation.tokens[0])), generation.stats


@pytest.fixture(scope="module")
def full(model, tokenizer, prompt, example):
    return answered(model, tokenizer, prompt, example, make_policy("full", model=model))


def test_full_cache_finds_the_needle(full):
    score, stats = full
    assert score == 1
    assert stats.kv_ratio == 1
    # each token takes 30 layers × 3 kv heads × 64 × (k, v) × float32
    assert stats.full_bytes == int(stats.tokens.sum()) * 30 * 3 * 64 * 2 * 4


@pytest.mark.thorough
def test_eviction_with_the_question_finds_the_needle_in_a_quarter_of_the_memory(
    model, tokenizer, prompt, example, full
):
    # SnapKV keeps only the first digits, which the question attends to; TOVA's last query attends to the whole number
    policy = make_policy("tova:ratio=0.25", model=model)
    score, stats = answered(model, tokenizer, prompt, example, policy, with_question=True)
    assert score == 1
    assert stats.kv_ratio < 0.27  # this includes the entries of the answer
    assert stats.bytes < 0.4 * full[1].bytes  # these are the bytes of the pool, with its margin


def test_trained_gates_keep_the_needle_without_the_question(model, tokenizer, prompt, example, full):
    """The gates in the repository are used at their τ."""
    gates = Path(__file__).parents[2] / "gates" / "smollm2-135m" / "lambda-0.15"
    score, stats = answered(model, tokenizer, prompt, example, make_policy("wgkv", model=model, gates=gates))
    assert score == 1
    assert stats.kv_ratio < 0.35
    assert stats.bytes < 0.5 * full[1].bytes  # these are the bytes of the pool, with its margin


@pytest.mark.thorough
def test_trained_gates_keep_the_needle_in_bfloat16(file, tokenizer, prompt, example, full):
    """This is the setting of the published table."""
    model = load_model(file, "bfloat16")
    gates = Path(__file__).parents[2] / "gates" / "smollm2-135m" / "lambda-0.15"
    score, stats = answered(model, tokenizer, prompt, example, make_policy("wgkv", model=model, gates=gates))
    assert score == 1
    assert stats.kv_ratio < 0.35
    assert 2 * stats.full_bytes == full[1].full_bytes


@pytest.mark.thorough
def test_streaming_llm_loses_the_needle(model, tokenizer, prompt, example, full):
    """The needle is further back than the window."""
    value = np.array(tokenizer(example.questions[0].expected[0])["input_ids"])
    windows = np.lib.stride_tricks.sliding_window_view(prompt.context, len(value))
    (place,) = np.flatnonzero((windows == value).all(1))
    window = LENGTH // 4
    assert 64 < place < len(prompt.context) - window
    policy = make_policy({"streaming_llm": {"sink": 64, "window": window}}, model=model)
    score, stats = answered(model, tokenizer, prompt, example, policy)
    assert score == 0
    assert stats.kv_ratio < 0.31
    assert stats.bytes < 0.42 * full[1].bytes  # the pool has a margin, and its size is rounded


def test_saved_model_has_the_same_logits(model, file, tokenizer, tmp_path):
    save_model(model, tmp_path / "saved", tokenizer_from=file)
    tokens = tokenizer("The capital of France is")["input_ids"]
    np.testing.assert_array_equal(logits(load_model(tmp_path / "saved"), [tokens]), logits(model, [tokens]))
