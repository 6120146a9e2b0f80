"""Compare Gemma 3 270M from its GGUF file with transformers' results for the same file (`make_goldens.py`)."""

import os
from pathlib import Path

import numpy as np
import pytest

from kvjax.inference import generate, logits
from kvjax.models import load_model, load_tokenizer, read_config
from kvjax.policies import make_policy
from kvjax.sampling_params import SamplingParams
from tests.models.make_goldens import GOLDENS, LONG

FILE = Path(os.environ.get("KVJAX_GEMMA3", ""))


@pytest.fixture(scope="module")
def golden():
    return dict(np.load(GOLDENS / "gemma3_270m.npz"))


@pytest.fixture(scope="module")
def model():
    return load_model(FILE)


def test_config_matches_the_published_model():
    config = read_config(FILE)
    assert (config.num_layers, config.width, config.head_dim, config.num_kv_heads) == (18, 640, 256, 1)
    assert (config.sliding_window, config.full_layers) == (512, (5, 11, 17))
    assert (config.rope.theta, config.sliding_rope.theta, config.query_factor) == (1e6, 1e4, 1.0)


def test_logits_and_answers_match_transformers(model, golden):
    """The text is longer than the windows, and is read in pieces."""
    np.testing.assert_array_equal(load_tokenizer(FILE)(LONG)["input_ids"], golden["tokens"])
    found = logits(model, golden["tokens"][None])[0][np.ix_(golden["positions"], golden["ids"])]
    assert abs(found - golden["logits"]).max() <= 1e-4 * abs(golden["logits"]).max()
    answer = generate(model, [golden["tokens"]], SamplingParams(max_new_tokens=16), chunk=256).tokens[0]
    np.testing.assert_array_equal(answer, golden["answer"][:16])


def test_eviction_that_keeps_all_does_not_change_windows(model, golden):
    policy = make_policy("snapkv:ratio=1.0", model=model)
    answer = generate(model, [golden["tokens"]], SamplingParams(max_new_tokens=16), policy=policy).tokens[0]
    np.testing.assert_array_equal(answer, golden["answer"][:16])
