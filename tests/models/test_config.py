"""Reading `config.json`: both spellings of everything, and one line for everything else."""

import dataclasses

import pytest

from kvjax.errors import UserError
from kvjax.models import ModelConfig
from kvjax.models.config import config_json
from tests.models.cases import CASES, LLAMA, QWEN3


@pytest.fixture
def refused(read):
    def refused(config) -> str:
        with pytest.raises(UserError) as caught:
            read(config)
        message = str(caught.value)
        assert "\n" not in message
        assert "config.json: " in message
        return message.split("config.json: ", 1)[1]

    return refused


def test_the_flags_of_each_family(read):
    def flags(case):
        config = read(case)
        return (config.qk_norm, config.attention_bias, config.attention_out_bias, config.mlp_bias)

    assert flags(CASES["llama3"]) == (False, False, False, False)
    assert flags(CASES["biases"]) == (False, True, True, True)
    assert flags(CASES["mistral"] | {"attention_bias": True}) == (False, False, False, False)
    assert flags(CASES["qwen2"] | {"mlp_bias": True}) == (False, True, False, False)
    assert flags(CASES["qwen3_biases"]) == (True, True, True, False)


def test_without_dual_chunk_attention_a_model_is_for_what_it_was_trained_on(read, refused):
    declared = CASES["qwen2"] | {"max_position_embeddings": 1_010_000}
    assert read(declared).longest == 1_010_000
    chunks = {"chunk_size": 262_144, "local_size": 8192, "original_max_position_embeddings": 262_144}
    assert read(declared | {"dual_chunk_attention_config": chunks}).longest == 262_144
    wrong = declared | {"dual_chunk_attention_config": {"original_max_position_embeddings": "all"}}
    assert refused(wrong) == (
        "dual_chunk_attention_config: original_max_position_embeddings must be int, got 'all'"
    )


def test_sizes_that_are_derived(read):
    config = read(CASES["llama2"])
    assert (config.num_kv_heads, config.head_dim, config.rope.theta) == (4, 12, 10000.0)
    assert read(QWEN3).head_dim == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma"}, "model_type 'gemma' is not supported, only llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "swish2"}, "activation 'swish2' is not supported, only silu, relu, gelu,"),
        (
            {"rope_scaling": {"type": "longrope"}},
            "rope_scaling: rope type 'longrope' is not supported, only default",
        ),
        ({"rope_parameters": {"rope_type": "mrope"}}, "rope_parameters: rope type 'mrope' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "rope_scaling: factor must be float, got '4'"),
        (
            {"rope_scaling": {"type": "linear", "factor": 0}},
            "rope_scaling: rope theta and factor must be positive, got 10000 and 0",
        ),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
            "rope_theta is given as 10000 and as 1e+06",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "default"}},
            "rope_scaling and rope_parameters contradict each other",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "rope_parameters: rotary embeddings that differ by layer are not supported",
        ),
        ({"partial_rotary_factor": 0.5}, "a partial_rotary_factor other than 1 is not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": "three"}, "num_hidden_layers must be int, got 'three'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be bool, got 1"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be int, got True"),
        ({"num_attention_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"max_position_embeddings": 0}, "max_position must be at least 1, got 0"),
        ({"num_key_value_heads": 3}, "3 kv heads do not divide 4 query heads"),
        ({"head_dim": 7}, "head_dim is 7, but rotary embeddings need an even one"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id or a list of them, got ['</s>']"),
        ({"quantization_config": {"bits": 4}}, "quantized weights (quantization_config) are not supported"),
        (
            {"model_type": "mistral", "sliding_window": 512},
            "sliding_window is 512, but sliding-window attention",
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 512},
            "sliding_window is 512, but",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has sliding_attention; only"),
    ],
)
def test_what_is_refused(change, message, refused):
    assert refused(LLAMA | change).startswith(message)


def test_a_sliding_window_is_refused_only_where_it_would_hide_something(read, refused):
    mistral = LLAMA | {"model_type": "mistral"}
    read(mistral | {"sliding_window": None})
    read(mistral | {"sliding_window": 1024})
    missing = mistral | {"max_position_embeddings": 8192}
    assert refused(missing).startswith("sliding_window is 4096 (its default), but")
    # Qwen files name a window that is switched off
    read(LLAMA | {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 512})


def test_eos_ids_are_those_of_generation_config_if_it_is_there(read):
    assert read(LLAMA | {"eos_token_id": 2}).eos_ids == (2,)
    assert read(LLAMA | {"eos_token_id": [5, 2]}).eos_ids == (2, 5)
    assert read(LLAMA | {"eos_token_id": 2}, eos_token_id=[7, 9]).eos_ids == (7, 9)
    assert read(LLAMA, eos_token_id=None).eos_ids == ()


def test_a_model_that_no_family_matches_is_not_written(read):
    config = read(CASES["llama3"])
    for change, message in (
        ({"qk_norm": True}, "a llama model cannot have qk_norm=True"),
        ({"attention_bias": True}, "a llama model cannot have attention_out_bias=False"),
        ({"model_type": "qwen2"}, "a qwen2 model cannot have attention_bias=False"),
        ({"model_type": "other"}, "model_type 'other' has no Hugging Face class"),
    ):
        with pytest.raises(UserError, match=message):
            config_json(dataclasses.replace(config, **change), "float32")


def test_sizes_are_checked_without_a_file(read):
    config = read(LLAMA)
    assert isinstance(config, ModelConfig)
    with pytest.raises(UserError, match="num_kv_heads must be at least 1, got 0"):
        dataclasses.replace(config, num_kv_heads=0)
