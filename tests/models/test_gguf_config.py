"""Tests of reading a model's configuration from the metadata of a GGUF file, and of refused metadata."""

import numpy as np
import pytest

from kvjax.models import read_config
from tests.models.cases import LLAMA, PHI4_MINI, weights
from tests.models.gguf_cases import write_gguf
from tests.models.refusals import error_in


def test_turn_ends_are_eos_ids(tmp_path):
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eom_id|>"]
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "<|im_start|>{{ message }}<|im_end|>",
    }

    def eos(**more):
        named = {f"tokenizer.ggml.{name}_token_id": id_ for name, id_ in more.items()}
        file = write_gguf(tmp_path / "model.gguf", LLAMA, weights(LLAMA), metadata=metadata | named)
        return read_config(file).eos_ids

    assert eos() == (0, 2)
    assert eos(eos=2, eot=1, eom=3) == (1, 2, 3)


def test_rope_factor_without_a_type_is_linear(tmp_path):
    """The behaviour is that of llama.cpp."""
    found = write_gguf(
        tmp_path / "a.gguf", LLAMA, weights(LLAMA), metadata={"llama.rope.scaling.factor": 4.0}
    )
    rope = read_config(found).rope
    assert (rope.type, rope.factor) == ("linear", 4.0)


REFUSED = {
    "general.architecture": (
        "gemma2",
        "architecture 'gemma2' is not supported, only gemma3, llama, phi3, qwen2, qwen3, qwen3moe",
    ),
    "split.count": (
        3,
        "is part 1 of 3 of a split GGUF file: merge the parts first (llama-gguf-split --merge",
    ),
    "general.type": (
        "adapter",
        "is not a language model but a LoRA adapter: merge it into its base model first",
    ),
    "general.alignment": (24, "general.alignment must be a power of two, got 24"),
    "llama.block_count": (5000, "llama.block_count is 5000, but the file has 30 tensors"),
    "tokenizer.ggml.tokens": ([1, 2], "tokenizer.ggml.tokens must be a list of strings"),
    "llama.expert_count": (8, "llama.expert_count is 8, which is not supported"),
    "llama.attention.scale": (1.0, "llama.attention.scale is 1, which is not supported"),
    "llama.logit_scale": (0.5, "llama.logit_scale is 0.5, which is not supported"),
    "llama.rope.scaling.yarn_attn_factor": (
        1.0,
        "llama.rope.scaling.yarn_attn_factor is 1, which is not supported",
    ),
    "llama.final_logit_softcapping": (30.0, "llama.final_logit_softcapping is 30, which is not supported"),
    "llama.rope.scale_linear": (4.0, "llama.rope.scale_linear is 4, which is not supported"),
    "llama.rope.scaling.attn_factor": (2.0, "llama.rope.scaling.attn_factor is 2, which is not supported"),
    "llama.pooling_type": (1, "llama.pooling_type is 1, which is not supported"),
    "llama.attention.causal": (False, "llama.attention.causal is false: it is an embedding model"),
    "llama.rope.dimension_count": (6, "a partial_rotary_factor other than 1 is not supported"),
    "llama.feed_forward_length": (None, "llama.feed_forward_length is missing"),
    "llama.embedding_length": ("48", "llama.embedding_length must be int, got '48'"),
    "llama.rope.scaling.type": ("longrope", "rope scaling 'longrope' is not supported, only linear and yarn"),
    "llama.attention.sliding_window": (
        64,
        "llama.attention.sliding_window is 64, which is not supported",
    ),
    "llama.attention.head_count_kv": ([2, 2, 1], "llama.attention.head_count_kv must be int, got [2, 2, 1]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_metadata_is_refused(name, tmp_path):
    value, message = REFUSED[name]
    file = write_gguf(tmp_path / "model.gguf", LLAMA, weights(LLAMA), metadata={name: value})
    assert error_in(file).startswith(message)


def test_neutral_metadata_is_accepted(tmp_path):
    plain = write_gguf(tmp_path / "plain.gguf", LLAMA, weights(LLAMA))
    factors = {f"llama.{name}": 1.0 for name in ("logit_scale", "embedding_scale", "residual_scale")}
    metadata = factors | {
        "llama.rope.scale_linear": 1.0,
        "llama.expert_count": 0,
        "llama.attention.clamp_kqv": 0.0,
    }
    file = write_gguf(tmp_path / "model.gguf", LLAMA, weights(LLAMA), metadata=metadata)
    assert read_config(file) == read_config(plain)


def test_longrope_factors_of_a_wrong_size_are_refused(tmp_path):
    case = PHI4_MINI | {"rope_scaling": None}
    for more, message in (
        (
            {"rope_factors_short": np.ones(5, np.float32)},
            "rope_factors_short.weight is of shape (5,), expected (6,)",
        ),
        (
            {"rope_factors_short": np.ones(6, np.float32)},
            "rope_factors_long.weight is missing, expected (6,)",
        ),
    ):
        file = write_gguf(tmp_path / f"{len(message)}.gguf", case, weights(case), more=more)
        assert error_in(file) == message


def test_rope_factors_other_than_llama_3s_are_refused(tmp_path):
    tensors = weights(LLAMA)
    for factors, refused in ((np.ones(6), False), (np.linspace(1, 3, 6), True), (np.full(5, 2.0), True)):
        more = {"rope_freqs": factors.astype(np.float32)}
        file = write_gguf(tmp_path / "model.gguf", LLAMA, tensors, more=more)
        if refused:
            assert error_in(file).startswith("rope_freqs.weight is not Llama 3's scaling")
        else:
            assert read_config(file).rope.type == "default"
