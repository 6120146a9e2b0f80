"""Fixtures of the plan tests: a model's shape, and a folder that holds nothing but its `config.json`."""

import pytest

from kvjax.models.config import ModelConfig, config_json
from kvjax.models.json_file import write_json


@pytest.fixture(scope="session")
def shape():
    """Return the shape of a model that TPU kernels take."""
    return ModelConfig(
        vocab_size=256, num_layers=2, width=128, mlp_width=256, num_heads=4, num_kv_heads=2, head_dim=64,
        qk_norm=True, tied=True, model_type="qwen3",
    )  # fmt: skip


@pytest.fixture(scope="session")
def folder(tmp_path_factory, shape):
    path = tmp_path_factory.mktemp("model")
    write_json(path / "config.json", config_json(shape, "bfloat16"))
    return path
