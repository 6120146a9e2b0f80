"""Finding a model's folder, and its tokenizer."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest

from kvjax.errors import UserError
from kvjax.models import load_tokenizer
from kvjax.models.folder import find_model
from tests.models.cases import QWEN3
from tests.models.refusals import error

BUILTIN = Path(__file__).parents[2] / "kvjax" / "builtin" / "model"


def test_a_folder_is_itself(tmp_path, monkeypatch):
    assert find_model(tmp_path) == tmp_path
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "model").mkdir(parents=True)
    # a folder wins over a hub id that is spelled alike
    assert find_model("owner/model") == Path("owner/model")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_model("~/owner") == tmp_path / "owner"


@pytest.mark.parametrize("name", ["missing", "./a/b", "/a/b", "a/b/c", Path("a/b")])
def test_what_is_no_hub_id_is_a_missing_folder(name):
    with pytest.raises(UserError, match="no such folder$"):
        find_model(name)


@pytest.mark.parametrize("name", ["models/x.gguf", "models/X.GGUF", "x.gguf"])
def test_a_missing_file_is_no_hub_id(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("the network is tried")
    )
    with pytest.raises(UserError, match=f"^{name}: no such file$"):
        find_model(name)


def test_the_tokenizer_of_a_model():
    tokenizer = load_tokenizer(BUILTIN)
    text = "def f(x):\n    return x"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_folders_without_a_tokenizer(tmp_path):
    # for Qwen transformers would make an empty one up
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    with pytest.raises(UserError, match=r"no tokenizer, expected tokenizer\.json or"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="its tokenizer cannot be read") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_file_with_nothing_in_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    file = tmp_path / "tokenizer.json"
    for text, wrong in (
        ("{}", "added_tokens is missing"),
        ('{"added_tokens": []}', "model is missing"),
        ("[]", "expected a JSON object, got list"),
    ):
        file.write_text(text)
        with pytest.raises(UserError) as caught:
            load_tokenizer(tmp_path)
        assert str(caught.value) == f"{tmp_path}: its tokenizer cannot be read ({file}: {wrong})"


def test_a_broken_config_is_not_said_to_be_the_tokenizer_s(tmp_path):
    shutil.copytree(BUILTIN, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: cannot be read as JSON"):
        load_tokenizer(tmp_path / "model")


@pytest.mark.parametrize(
    ("rows", "refused"), [(1078, True), (1079, False), (1088, False), (2176, False), (2177, True)]
)
def test_a_tokenizer_of_another_vocabulary_is_refused(rows, refused, tmp_path):
    """The built-in one has 1,088 tokens, 9 of them added. A vocabulary may be padded, to twice as much at most."""
    folder = tmp_path / "model"
    shutil.copytree(BUILTIN, folder)
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": rows}
    (folder / "config.json").write_text(json.dumps(config))
    if not refused:
        assert len(load_tokenizer(folder)) == 1088
        return
    with pytest.raises(
        UserError, match=rf"of another model: it has 1,088 tokens, .*\(vocab_size\) {rows:,}$"
    ):
        load_tokenizer(folder)


def test_a_folder_of_gguf_files_says_what_to_pass(tmp_path):
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(
        UserError, match=r"has no config\.json; pass one of its GGUF files: a\.gguf, b\.gguf$"
    ):
        find_model(tmp_path)


def test_a_hub_id_without_a_network(monkeypatch):
    message = error("some-owner/some-model")
    assert "some-owner/some-model: no such folder here" in message
    assert "the hub cannot be reached" in message
    assert "pass the path of a folder" in message
