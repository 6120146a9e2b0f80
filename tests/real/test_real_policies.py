"""Test the entries that policies keep of a real model's context, and that it still finds a needle in 2,048 tokens."""

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


def answered(model, tokenizer, prompt, example, policy, *, known=False) -> tuple[float, caches.Stats]:
    """Return the answer's score and the cache's sizes; `known`: the question is read with the context."""
    question = prompt.questions[0].prompt
    if known:
        said = generate(
            model,
            [np.concatenate([prompt.context, question])],
            SamplingParams(max_new_tokens=16),
            policy=policy,
            chunk=512,
        )
    else:
        cache = prefill(model, [prompt.context], policy=policy, chunk=512)
        said = generate(model, [question], SamplingParams(max_new_tokens=16), policy=policy, cache=cache)
    return example.questions[0].score(tokenizer.decode(said.tokens[0])), said.stats


@pytest.fixture(scope="module")
def full(model, tokenizer, prompt, example):
    return answered(model, tokenizer, prompt, example, make_policy("full", model=model))


def test_the_full_cache_finds_the_needle(full):
    score, stats = full
    assert score == 1
    assert stats.kv_ratio == 1
    # each token takes 30 layers × 3 kv heads × 64 × (k, v) × float32
    assert stats.full_bytes == int(stats.tokens.sum()) * 30 * 3 * 64 * 2 * 4


@pytest.mark.thorough
def test_an_eviction_that_knows_the_question_finds_it_in_a_quarter_of_the_memory(
    model, tokenizer, prompt, example, full
):
    # SnapKV keeps only the first digits, which the question attends to; TOVA's last query attends to the whole number
    policy = make_policy("tova:ratio=0.25", model=model)
    score, stats = answered(model, tokenizer, prompt, example, policy, known=True)
    assert score == 1
    assert stats.kv_ratio < 0.27  # this includes the entries of the answer
    assert stats.bytes < 0.4 * full[1].bytes  # these are the bytes of the pool, with its margin


def test_trained_gates_keep_it_though_no_question_is_known(model, tokenizer, prompt, example, full):
    """The gates are those of the repository, at their own τ."""
    gates = Path(__file__).parents[2] / "gates" / "smollm2-135m" / "lambda-0.15"
    score, stats = answered(model, tokenizer, prompt, example, make_policy("wgkv", model=model, gates=gates))
    assert score == 1
    assert stats.kv_ratio < 0.35
    assert stats.bytes < 0.5 * full[1].bytes  # these are the bytes of the pool, with its margin


@pytest.mark.thorough
def test_trained_gates_keep_it_in_bfloat16(file, tokenizer, prompt, example, full):
    """The setting is that of the published table: pages of bits, and layers' weights as integers where a CPU runs
    them."""
    model = load_model(file, "bfloat16")
    gates = Path(__file__).parents[2] / "gates" / "smollm2-135m" / "lambda-0.15"
    score, stats = answered(model, tokenizer, prompt, example, make_policy("wgkv", model=model, gates=gates))
    assert score == 1
    assert stats.kv_ratio < 0.35
    assert 2 * stats.full_bytes == full[1].full_bytes


@pytest.mark.thorough
def test_sinks_and_a_window_have_lost_it(model, tokenizer, prompt, example, full):
    """The needle stands further back than the window."""
    value = np.array(tokenizer(example.questions[0].expected[0])["input_ids"])
    windows = np.lib.stride_tricks.sliding_window_view(prompt.context, len(value))
    (place,) = np.flatnonzero((windows == value).all(1))
    window = LENGTH // 4
    assert 64 < place < len(prompt.context) - window
    policy = make_policy({"streaming_llm": {"sink": 64, "window": window}}, model=model)
    score, stats = answered(model, tokenizer, prompt, example, policy)
    assert score == 0
    assert stats.kv_ratio < 0.31
    assert stats.bytes < 0.42 * full[1].bytes  # the pool has a margin, and one of few sizes


def test_a_saved_model_is_the_same(model, file, tokenizer, tmp_path):
    save_model(model, tmp_path / "saved", tokenizer_from=file)
    tokens = tokenizer("The capital of France is")["input_ids"]
    np.testing.assert_array_equal(logits(load_model(tmp_path / "saved"), [tokens]), logits(model, [tokens]))
