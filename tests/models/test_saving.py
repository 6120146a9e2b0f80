"""Tests of writing Hugging Face folders."""

import json

import jax
import numpy as np
import pytest
import transformers
from safetensors import safe_open

from kvjax.errors import UserError
from kvjax.mesh import make_mesh
from kvjax.models import load_model, save_model, saving
from tests.models.cases import CASES, LLAMA, TOKENS, hf_shapes, weights, write_folder
from tests.models.files import assert_equal


def test_unsupported_family_is_refused_before_writing(tmp_path):
    model = load_model(write_folder(tmp_path / "from", CASES["gpt_oss"]))
    with pytest.raises(UserError, match="models of the form gpt_oss are read, but not written"):
        save_model(model, tmp_path / "to")
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("name", [name for name in CASES if name != "gpt_oss"])
def test_saved_models_load_equal_and_transformers_reads_their_configs(name, tmp_path):
    case = CASES[name] | {"eos_token_id": [3, 7], "bos_token_id": 1}
    folder = write_folder(tmp_path / "from", case)
    model = load_model(folder, max_length=TOKENS)
    save_model(model, tmp_path / "to")
    again = load_model(tmp_path / "to", max_length=TOKENS)
    assert again.config == model.config
    assert_equal(again, model)
    with safe_open(tmp_path / "to" / "model.safetensors", framework="numpy") as file:
        assert {n: tuple(file.get_slice(n).get_shape()) for n in file.keys()} == hf_shapes(case)  # noqa: SIM118
    ours, theirs = (transformers.AutoConfig.from_pretrained(f) for f in (tmp_path / "to", folder))
    for key in case.keys() - {
        "rope_scaling",
        "rope_parameters",
        "rope_theta",
        "sliding_window",
        "rope_local_base_freq",
        "sliding_window_pattern",
    }:
        assert getattr(ours, key) == getattr(theirs, key), key
    # our file also has the keys that theirs leaves to defaults
    rope = {key: value for key, value in theirs.rope_parameters.items() if key != "type"}
    assert rope.items() <= ours.rope_parameters.items()


@pytest.mark.parametrize("file_bytes", [2 << 30, 100_000], ids=["one file", "several"])
def test_weights_survive_saving_bit_for_bit(file_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "FILE_BYTES", file_bytes)
    source = write_folder(tmp_path / "from", LLAMA)
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
        save_model(load_model(source), tmp_path / "to")
    files = sorted((tmp_path / "to").glob("*.safetensors"))
    assert len(files) == (1 if file_bytes > 1 << 30 else 3)
    saved = {}
    for path in files:
        with safe_open(path, framework="numpy") as file:
            assert file.metadata() == {"format": "pt"}
            saved |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    expected = weights(LLAMA)
    assert saved.keys() == expected.keys()
    for name, x in saved.items():
        np.testing.assert_array_equal(x, expected[name], err_msg=name)
    if len(files) > 1:
        index = json.loads((tmp_path / "to" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(x.nbytes for x in expected.values())
        assert index["weight_map"].keys() == expected.keys()
    assert_equal(load_model(tmp_path / "to"), load_model(source))


@pytest.mark.parametrize("name", ["llama31", "biases", "qwen2", "qwen3"])
def test_transformers_logits_of_a_saved_folder_are_equal(name, tmp_path):
    torch = pytest.importorskip("torch")
    folder = write_folder(tmp_path / "from", CASES[name])
    save_model(load_model(folder), tmp_path / "to")
    tokens = torch.arange(40)[None]

    def logits(folder):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert model.dtype == torch.float32
        with torch.no_grad():
            return model(tokens).logits

    torch.testing.assert_close(logits(tmp_path / "to"), logits(folder), rtol=0, atol=0)


def test_tokenizer_is_copied(tmp_path):
    source = write_folder(tmp_path / "from", LLAMA)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (source / name).write_text("{}")
    (source / "notes.txt").write_text("not copied")
    save_model(load_model(source), tmp_path / "to", tokenizer_from=source)
    names = {path.name for path in (tmp_path / "to").iterdir()}
    assert names == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    }


def test_failed_save_leaves_nothing_behind(tmp_path, monkeypatch):
    model = load_model(write_folder(tmp_path / "from", LLAMA))

    def full(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(saving, "write_tensors", full)
    with pytest.raises(OSError, match="No space left"):
        save_model(model, tmp_path / "to")
    assert [path.name for path in tmp_path.iterdir()] == ["from"]


def test_only_empty_folders_are_written_to(tmp_path):
    source = write_folder(tmp_path / "from", LLAMA)
    model = load_model(source)
    with pytest.raises(UserError, match="exists and is not an empty folder"):
        save_model(model, source)
    (tmp_path / "empty").mkdir()
    save_model(model, tmp_path / "empty")
    assert_equal(load_model(tmp_path / "empty"), model)
