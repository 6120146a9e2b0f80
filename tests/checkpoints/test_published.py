"""Tests of finding the gates for a model in a hub repository."""

import huggingface_hub
import pytest

from kvjax.checkpoints.published import find_gates
from kvjax.errors import UserError

FILES = {
    "Jang-Hyun/Fast-KVzip": ["qwen3-8b/q4_dim16_sink16.pt", "qwen3-14b/q5_dim16_sink16.pt"],
    "someone/write-gates": ["llama-3.1-8b-0.04.pt", "llama-3.1-8b-0.32.pt", "qwen3-4b-0.04.pt"],
    "ngocbh/TrimKV-Qwen3-4B-Math": ["config.json", "trimkv_weights.pth"],
    "someone/export": ["config.json", "gates.safetensors"],
    "someone/exports": ["qwen3-8b/config.json", "qwen3-8b/gates.safetensors"],
}


@pytest.fixture(autouse=True)
def hub(tmp_path, monkeypatch):
    """Replace the hub with repositories of `FILES`, whose files are given only if they match the requested patterns,
    and return their folder."""

    def download(hub_id, allow_patterns):
        root = tmp_path / hub_id
        for name in FILES[hub_id]:
            if any(huggingface_hub.utils.filter_repo_objects([name], allow_patterns=allow_patterns)):
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).touch()
        return str(root)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return tmp_path


@pytest.mark.parametrize(
    ("gates", "model", "found"),
    [
        ("Jang-Hyun/Fast-KVzip", "Qwen/Qwen3-8B", "Jang-Hyun/Fast-KVzip/qwen3-8b/q4_dim16_sink16.pt"),
        ("Jang-Hyun/Fast-KVzip", "/models/Qwen3-14B/", "Jang-Hyun/Fast-KVzip/qwen3-14b/q5_dim16_sink16.pt"),
        ("someone/write-gates", "Qwen/Qwen3-4B", "someone/write-gates/qwen3-4b-0.04.pt"),
        (
            "someone/write-gates/llama-3.1-8b-0.32.pt",
            "Llama-3.1-8B",
            "someone/write-gates/llama-3.1-8b-0.32.pt",
        ),
        ("ngocbh/TrimKV-Qwen3-4B-Math", "Qwen/Qwen3-4B", "ngocbh/TrimKV-Qwen3-4B-Math/trimkv_weights.pth"),
        ("someone/export", "whatever", "someone/export"),
        ("someone/exports", "Qwen/Qwen3-8B", "someone/exports/qwen3-8b"),
    ],
)
def test_hub_id_gives_the_file_for_the_model(hub, gates, model, found):
    assert find_gates(gates, model) == str(hub / found)


def test_other_values_are_returned_unchanged(tmp_path):
    (tmp_path / "runs/qwen").mkdir(parents=True)
    for gates in (str(tmp_path / "runs/qwen"), "builtin", "nowhere.pt", tmp_path, None, "../a/b"):
        assert find_gates(gates, "Qwen/Qwen3-8B") is gates


def test_a_missing_folder_in_an_existing_one_is_no_hub_id(tmp_path, monkeypatch):
    (tmp_path / "runs/qwen").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="gates runs/qwen/gates: no such file or folder"):
        find_gates("runs/qwen/gates", "Qwen/Qwen3-8B")


@pytest.mark.parametrize(
    ("gates", "model", "message"),
    [
        ("Jang-Hyun/Fast-KVzip", "meta/Llama-3-8B", "it has none for the model llama-3-8b"),
        (
            "someone/write-gates",
            "Llama-3.1-8B",
            "several for llama-3.1-8b: name one, someone/write-gates/FILE",
        ),
        ("someone/export/other.pt", "Llama-3.1-8B", "someone/export has no other.pt"),
    ],
)
def test_no_file_or_several_files_are_refused(gates, model, message):
    with pytest.raises(UserError, match=message):
        find_gates(gates, model)
