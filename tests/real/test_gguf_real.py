"""Compare SmolLM2-135M-Instruct from its GGUF file with transformers' results for the same file (`make_goldens.py`)."""

import hashlib

import jax
import numpy as np
import pytest

from kvjax.checkpoints.fingerprint import contents, fingerprint
from kvjax.inference import generate
from kvjax.mesh import make_mesh, put, use_mesh
from kvjax.models import load_model, read_config
from kvjax.models.chat import encode
from kvjax.sampling_params import SamplingParams
from tests.models.make_goldens import GOLDENS, QUESTION, TEXT
from tests.models.pieces import ends


@pytest.fixture(scope="module")
def golden():
    return dict(np.load(GOLDENS / "smollm2.npz"))


def logits(model, tokens: np.ndarray) -> np.ndarray:
    with use_mesh(model):
        return np.asarray(ends(model, put(tokens[None]))["logits"][0])


def assert_close(found: np.ndarray, expected: np.ndarray):
    assert abs(found - expected).max() <= 1e-4 * abs(expected).max()


def test_config_matches_the_published_model(file):
    """The values are those of config.json and generation_config.json of HuggingFaceTB/SmolLM2-135M-Instruct."""
    config = read_config(file)
    assert (config.num_layers, config.width, config.mlp_width, config.head_dim) == (30, 576, 1536, 64)
    assert (config.num_heads, config.num_kv_heads, config.vocab_size, config.tied) == (9, 3, 49152, True)
    assert (config.rope.type, config.rope.theta, config.norm_eps) == ("default", 100_000, 1e-5)
    assert (config.max_position, config.bos_id, config.eos_ids) == (8192, 1, (2,))


def test_tokenizer_matches_the_published_model(tokenizer, golden):
    assert len(tokenizer) == 49152
    named = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    assert named == ("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>")
    # every digit is one token, and no token is added
    assert tokenizer.tokenize("In 2023") == ["In", "Ġ", "2", "0", "2", "3"]
    assert tokenizer("In 2023")["input_ids"] == tokenizer.convert_tokens_to_ids(
        ["In", "Ġ", "2", "0", "2", "3"]
    )
    np.testing.assert_array_equal(tokenizer(TEXT)["input_ids"], golden["tokens"])
    assert tokenizer.decode(golden["tokens"]) == TEXT
    prompt = encode(tokenizer, QUESTION)
    np.testing.assert_array_equal(prompt, golden["prompt"])
    assert tokenizer.decode(prompt) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_fingerprint_of_earlier_versions_is_unchanged(model):
    """The expected values were computed when weights were not fused in storage."""
    assert hashlib.sha256(fingerprint(model).encode()).hexdigest()[:16] == "87fc9165758cb3ce"
    assert contents(model) == "b3c29105b2684930"


def test_logits_match_transformers(model, golden):
    found = logits(model, golden["tokens"])
    assert_close(found[np.ix_(golden["positions"], golden["ids"])], golden["logits"])


def test_answer_matches_transformers(model, golden):
    answer = generate(model, [golden["prompt"]], SamplingParams(max_new_tokens=32)).tokens[0]
    # kvjax's answer has no stop token
    assert golden["answer"][-1] in model.config.eos_ids
    np.testing.assert_array_equal(answer, golden["answer"][:-1])


@pytest.mark.thorough
def test_mesh_does_not_change_logits(file, golden):
    with jax.set_mesh(make_mesh(tensor=3)):
        found = logits(load_model(file), golden["tokens"])
    assert_close(found[np.ix_(golden["positions"], golden["ids"])], golden["logits"])


def test_all_logits_match_the_torch_model(file, model, golden):
    torch = pytest.importorskip("torch", reason="the parity extra is not installed")
    from tests.models.make_goldens import real_model

    with torch.no_grad():
        expected = real_model(file)(torch.tensor(golden["tokens"][None], dtype=torch.long)).logits[0].numpy()
    assert_close(expected[np.ix_(golden["positions"], golden["ids"])], golden["logits"])
    assert_close(logits(model, golden["tokens"]), expected)
