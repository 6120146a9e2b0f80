"""Tests of finding the shapes of models by name, and by a folder without weights."""

import math

import pytest

from kvjax.errors import UserError
from kvjax.models.config import config_json, read_config
from kvjax.models.json_file import write_json
from kvjax.models.shapes import find_shape, known_shapes
from tests.tiny_models import tiny_config

PARAMETERS = {
    # these counts are on the models' cards; a tied table counts once
    "llama-3.2-1b": 1.24e9,
    "llama-3.2-3b": 3.21e9,
    "llama-3.1-8b": 8.03e9,
    "llama-3.1-70b": 70.6e9,
    "mistral-7b-instruct-v0.2": 7.24e9,
    "qwen2.5-7b": 7.61e9,
    "qwen2.5-7b-instruct-1m": 7.61e9,
    "qwen3-4b": 4.02e9,
    "qwen3-8b": 8.19e9,
    "qwen3-14b": 14.8e9,
    "qwen3-30b-a3b": 30.5e9,
    "gemma-3-12b": 11.77e9,
    "gpt-oss-20b": 20.9e9,
}


@pytest.mark.parametrize("name", known_shapes())
def test_known_shapes_have_the_published_parameter_counts(name):
    shape = find_shape(name)
    c = shape.config
    heads = c.num_heads + c.num_kv_heads
    layer = 2 * c.width * c.head_dim * heads + 3 * c.width * c.mlp_width * max(c.num_experts, 1)
    tables = c.vocab_size * c.width * (1 if c.tied else 2)
    assert math.isclose(c.num_layers * layer + tables, PARAMETERS[name], rel_tol=0.006)
    assert shape.dtype == "bfloat16"


def test_hub_id_matches_the_longest_known_prefix():
    assert find_shape("meta-llama/Llama-3.1-8B-Instruct") == find_shape("llama-3.1-8b")
    assert find_shape("Qwen/Qwen3-4B-Instruct-2507") == find_shape("qwen3-4b")
    assert find_shape("Qwen/Qwen2.5-7B-Instruct") == find_shape("qwen2.5-7b")
    longer = find_shape("Qwen/Qwen2.5-7B-Instruct-1M")
    assert longer == find_shape("qwen2.5-7b-instruct-1m")
    assert longer.config.longest == 262_144


def test_folder_needs_no_weights(tmp_path):
    write_json(tmp_path / "config.json", config_json(tiny_config(), "bfloat16"))
    assert find_shape(str(tmp_path)).config == read_config(tmp_path)
    assert find_shape(str(tmp_path)).dtype == "bfloat16"


def test_unknown_name_is_refused():
    with pytest.raises(
        UserError,
        match="^--model nobody/Llama-9: no such folder and no known shape; known are gemma-3-12b, gpt-oss-20b, llama",
    ):
        find_shape("nobody/Llama-9")
