"""Tests of LoRA adapters as models: they are merged into their base model, or refused with its name."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvjax.checkpoints.fingerprint import contents
from kvjax.models import load_model, read_config
from tests.models.cases import LLAMA, weights, write_folder
from tests.models.files import assert_equal
from tests.models.refusals import error

TARGETS = "self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"
RANK = 4
SETTINGS = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": RANK,
    "lora_alpha": 10,
    "lora_dropout": 0.1,
    "bias": "none",
    "target_modules": [target.rpartition(".")[2] for target in TARGETS],
    "init_lora_weights": True,
    "use_rslora": False,
    "use_dora": False,
    "rank_pattern": {},
    "modules_to_save": None,
    "megatron_core": "megatron.core",
}
A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture
def base(tmp_path) -> Path:
    return write_folder(tmp_path / "base", LLAMA)


def write_adapter(base: Path, changes: dict | None = None, targets=TARGETS) -> Path:
    """Write an adapter for a folder of `LLAMA`."""
    folder, random, tensors = base.parent / "adapter", np.random.default_rng(3), {}
    for name, x in weights(LLAMA).items():
        if (
            name.removesuffix(".weight").partition("layers.")[2].partition(".")[2] in targets
            or name in targets
        ):
            inner = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{inner}.lora_A.weight"] = random.standard_normal((RANK, x.shape[1])).astype(np.float32)
            tensors[f"{inner}.lora_B.weight"] = random.standard_normal((x.shape[0], RANK)).astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = SETTINGS | {"base_model_name_or_path": str(base)} | (changes or {})
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(
    ("changes", "targets", "scale"),
    [({}, TARGETS, 10 / 4), ({"use_rslora": True}, ("lm_head.weight",), 10 / 2)],
    ids=["lora", "rslora of the head"],
)
def test_adapter_is_merged_into_its_base_model(changes, targets, scale, base):
    adapter = write_adapter(base, changes, targets)
    update = load_file(adapter / "adapter_model.safetensors")
    merged = weights(LLAMA)
    for name in (name for name in update if "lora_A" in name):
        ours = name.removeprefix("base_model.model.").replace(".lora_A", "")
        merged[ours] = merged[ours] + np.float32(scale) * (
            update[name.replace("lora_A", "lora_B")] @ update[name]
        )
    expected = load_model(write_folder(base.parent / "merged", LLAMA, merged))
    model = load_model(adapter)
    assert_equal(model, expected)
    assert contents(model) == contents(expected) != contents(load_model(base))
    assert read_config(adapter) == read_config(base)


@pytest.mark.parametrize(
    "changes",
    [
        {"peft_type": "IA3"},
        {"use_dora": True},
        {"bias": "all"},
        {"fan_in_fan_out": True},
        {"modules_to_save": ["lm_head"]},
        {"rank_pattern": {"q_proj": 8}},
        {"alpha_pattern": {"q_proj": 8}},
        {"init_lora_weights": "pissa"},
        {"a_key_of_the_future": 1},
    ],
    ids=str,
)
def test_unsupported_adapters_are_refused_with_their_base_named(changes, base):
    message = error(write_adapter(base, changes))
    assert f"merge it onto its base model, {base}, first" in message


def test_missing_base_model_is_named(base):
    message = error(write_adapter(base, {"base_model_name_or_path": "/nowhere/llama"}))
    assert message.endswith("the base model of this adapter is not found: /nowhere/llama: no such folder")
    (base / "model.safetensors").unlink()
    (base / "adapter_config.json").write_text(json.dumps(SETTINGS | {"base_model_name_or_path": "x"}))
    (base.parent / "adapter" / "adapter_config.json").write_text(
        json.dumps(SETTINGS | {"base_model_name_or_path": str(base)})
    )
    assert "an adapter of another adapter" in error(base.parent / "adapter")


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (A, None, "only one of the two matrices of model.layers.0.self_attn.q_proj.weight"),
        (A, np.zeros((3, 48), np.float32), "has shape (3, 48), expected (4, 48)"),
        (A.replace("layers.0", "layers.9"), np.zeros((4, 48), np.float32), "is not a LoRA matrix"),
        (
            A.replace("lora_A.weight", "lora_magnitude_vector"),
            np.zeros(48, np.float32),
            "is not a LoRA matrix",
        ),
        (A, np.full((4, 48), np.nan, np.float32), "NaN or infinite numbers"),
    ],
)
def test_tensors_that_do_not_match_the_base_are_refused(name, tensor, message, base):
    file = write_adapter(base) / "adapter_model.safetensors"
    tensors = load_file(file) | {name: tensor}
    save_file({name: x for name, x in tensors.items() if x is not None}, file)
    assert message in error(file.parent)
