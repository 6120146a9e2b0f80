"""Tests of finding a model's folder and its tokenizer."""

import base64
import json
import os
import shutil
import struct
from pathlib import Path

import huggingface_hub
import pytest

from kvjax.errors import UserError
from kvjax.models import load_tokenizer
from kvjax.models.folder import find_model
from tests.models.cases import QWEN3
from tests.models.refusals import error

BUILTIN = Path(__file__).parents[2] / "kvjax" / "builtin" / "model"


def test_existing_folder_is_returned_unchanged(tmp_path, monkeypatch):
    assert find_model(tmp_path) == tmp_path
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "model").mkdir(parents=True)
    # a folder takes precedence over a hub id of the same name
    assert find_model("owner/model") == Path("owner/model")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_model("~/owner") == tmp_path / "owner"


@pytest.mark.parametrize("name", ["missing", "./a/b", "/a/b", "a/b/c", Path("a/b")])
def test_names_that_are_not_hub_ids_are_missing_folders(name):
    with pytest.raises(UserError, match="no such folder$"):
        find_model(name)


@pytest.mark.parametrize("name", ["models/x.gguf", "models/X.GGUF", "x.gguf"])
def test_missing_gguf_file_is_not_looked_up_on_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("the network is tried")
    )
    with pytest.raises(UserError, match=f"^{name}: no such file$"):
        find_model(name)


def test_tokenizer_round_trips_text():
    tokenizer = load_tokenizer(BUILTIN)
    text = "def f(x):\n    return x"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_folder_without_a_tokenizer_is_refused(tmp_path):
    # for Qwen, transformers would make up an empty tokenizer
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    with pytest.raises(UserError, match=r"no tokenizer, expected tokenizer\.json or"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="its tokenizer cannot be read"):
        load_tokenizer(tmp_path)


def test_empty_tokenizer_file_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    file = tmp_path / "tokenizer.json"
    for text, message in (
        ("{}", "added_tokens is missing"),
        ('{"added_tokens": []}', "model is missing"),
        ("[]", "expected a JSON object, got list"),
    ):
        file.write_text(text)
        with pytest.raises(UserError) as caught:
            load_tokenizer(tmp_path)
        assert str(caught.value) == f"{tmp_path}: its tokenizer cannot be read ({file}: {message})"


def test_broken_config_is_not_reported_as_the_tokenizers(tmp_path):
    shutil.copytree(BUILTIN, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: cannot be read as JSON"):
        load_tokenizer(tmp_path / "model")


@pytest.mark.parametrize(
    ("rows", "refused"), [(1078, True), (1079, False), (1088, False), (2176, False), (2177, True)]
)
def test_tokenizer_with_another_vocabulary_is_refused(rows, refused, tmp_path):
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


def changed(file: Path, **keys) -> None:
    """Change keys of a JSON file. None removes a key."""
    data = (json.loads(file.read_text()) if file.exists() else {}) | keys
    file.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


CODE = {"AutoConfig": "evil.C", "AutoTokenizer": ["evil.T", "evil.T"], "AutoProcessor": "evil.T"}


@pytest.mark.parametrize(
    ("config", "tokenizer", "refused"),
    [
        ({"auto_map": CODE}, {}, None),
        ({}, {"auto_map": CODE}, None),
        ({"auto_map": CODE}, {"auto_map": CODE, "tokenizer_class": "T"}, None),
        ({"auto_map": CODE, "tokenizer_class": "evil.T"}, {"tokenizer_class": None}, None),
        ({"auto_map": CODE, "model_type": "evil"}, {"auto_map": CODE}, "model_type 'evil' is not supported"),
        ({"auto_map": CODE, "model_type": None}, {"auto_map": CODE}, "model_type is missing"),
        (None, {"auto_map": CODE}, r"it needs code of its own \(auto_map\), and such code is never run"),
        (None, {"auto_map": ["evil.T", None]}, "it needs code of its own"),
        (
            None,
            {"auto_map": {"AutoTokenizer": ["some/repository--evil.T", None]}},
            "it needs code of its own",
        ),
        (
            {"auto_map": CODE},
            {"auto_map": CODE, "tokenizer_class": "AutoTokenizer"},
            "must be a tokenizer, got 'Auto",
        ),
        (
            {"auto_map": CODE},
            {"auto_map": CODE, "tokenizer_class": "AutoConfig"},
            "tokenizer_class must be a tokenizer, got 'AutoConfig'",
        ),
        ({"auto_map": CODE}, {"auto_map": CODE, "tokenizer_class": ["T"]}, "tokenizer cannot be read"),
        (
            {},
            {"fast_tokenizer_files": ["tokenizer.4.0.json"], "init_inputs": [1], "vocab_file": "evil.py"},
            None,
        ),
    ],
)
def test_code_in_a_folder_is_never_run(config, tokenizer, refused, tmp_path, monkeypatch):
    folder, mark = tmp_path / "model", tmp_path / "mark"
    shutil.copytree(BUILTIN, folder)
    for name in ("evil.py", "tokenizer.py", "tokenization_evil.py"):
        (folder / name).write_text(f"open({str(mark)!r}, 'w')\nclass C: pass\nclass T: pass\n")
    changed(folder / "processor_config.json", auto_map=CODE, processor_class="T")
    changed(folder / "tokenizer.4.0.json", added_tokens=[])
    changed(folder / "tokenizer_config.json", **tokenizer)
    if config is None:
        (folder / "config.json").unlink()
    else:
        changed(folder / "config.json", **config)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    if refused is None:
        loaded = load_tokenizer(folder)
        assert loaded("def f(x)")["input_ids"] == load_tokenizer(BUILTIN)("def f(x)")["input_ids"]
        assert loaded.name_or_path == str(folder)
    else:
        with pytest.raises(UserError, match=refused):
            load_tokenizer(folder)
    assert not mark.exists()


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "tokenizer.json",
        "merges.txt",
        "chat_template.jinja",
        "additional_chat_templates/rag.jinja",
    ],
)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_pipes_and_devices_as_tokenizer_files_are_refused(kind, name, tmp_path):
    shutil.copytree(BUILTIN, tmp_path / "model")
    file = tmp_path / "model" / name
    file.unlink(missing_ok=True)
    file.parent.mkdir(exist_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")
    with pytest.raises(
        UserError, match=rf"its tokenizer cannot be read \(.*/{name}: is not a regular file\)$"
    ):
        load_tokenizer(tmp_path / "model")


def test_byte_order_marks_are_accepted(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(BUILTIN, folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("rag")
    for file in (*folder.glob("*.json"), *folder.rglob("*.jinja")):
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert load_tokenizer(folder).chat_template == {"default": "{{ messages[0].content }}", "rag": "rag"}


def replaced(count: int, content: str, **pattern: str) -> dict:
    step = {"type": "Replace", "pattern": pattern, "content": content}
    return {"normalizer": {"type": "Sequence", "normalizers": [step] * count}}


LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TWICE = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2,
    "pair": [],
    "special_tokens": {},
}
LENGTHENS = "its {} may lengthen a text more than 10,000 times"
TABLE = base64.b64encode(struct.pack("<I", 8) + bytes(8) + b"x" * 20_000 + b"\0").decode()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replaced(9, "a" * 10, String="a"), LENGTHENS.format("normalizer")),
        (replaced(3, "a" * 50, String=""), LENGTHENS.format("normalizer")),
        (replaced(2, "a" * 200, Regex="."), LENGTHENS.format("normalizer")),
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": TABLE}},
            LENGTHENS.format("normalizer"),
        ),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA"}}, "PanicException"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "!"}}, "PanicException"),
        ({"normalizer": [1]}, r"normalizer must be dict, got \[1\]"),
        (
            {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [LEVEL] * 40}},
            LENGTHENS.format("pre_tokenizer"),
        ),
        (
            {"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}] * 200}},
            "its decoder has more than 100 steps",
        ),
        (
            {"post_processor": {"type": "Sequence", "processors": [TWICE] * 30}},
            LENGTHENS.format("post_processor"),
        ),
        ({"model": {"type": "BPE", "vocab": {}, "merges": [1, None]}}, "Exception data did not match"),
    ],
)
def test_tokenizer_that_lengthens_text_without_bound_is_refused(change, message, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(BUILTIN, folder)
    changed(folder / "tokenizer.json", **change)
    with pytest.raises(UserError, match=message):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"1000000000": {"content": "x"}}},
            "the id '1000000000'",
        ),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"x": {"content": "x"}}},
            "has the id 'x', expected",
        ),
        (
            "added_tokens.json",
            {f"<{i}>": i for i in range(100_001)},
            "it has 100,001 added tokens, expected at",
        ),
        ("added_tokens.json", {"<x>": -1}, "an added token has the id -1, expected one below 4,194,304"),
        ("vocab.json", {"x" * 2000: 1}, "a token has 2,000 characters, expected at most 1,024"),
        (
            "tokenizer.json",
            {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["x", 0.0], ["a" * 200_000, -1.0]]}},
            "a token has 200,000 characters, expected at most 1,024",
        ),
        (
            "tokenizer_config.json",
            {"additional_special_tokens": [f"<{i}>" for i in range(200_000)]},
            "it has 200,000 added tokens",
        ),
        ("config.json", {"num_hidden_layers": 10**9}, "num_layers must be at least 1 and at most 10,000"),
    ],
)
def test_sizes_without_bound_are_refused(name, keys, message, tmp_path):
    shutil.copytree(BUILTIN, tmp_path / "model")
    changed(tmp_path / "model" / name, **keys)
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path / "model")


def test_sentencepiece_model_with_a_huge_piece_is_refused(tmp_path):
    def message(size: int) -> bytes:
        length = bytes([size & 127 | 128, size >> 7 & 127 | 128, size >> 14])
        return b"\x0a" + length + bytes(size)

    (tmp_path / "tokenizer.model").write_bytes(message(30) + b"\x12\x03abc" + message(5000))
    with pytest.raises(UserError, match=r"tokenizer\.model: a piece has 5,000 bytes, expected at most 4,096"):
        load_tokenizer(tmp_path)


def test_transformers_does_not_read_the_models_configuration(tmp_path):
    """transformers would make a list of num_labels labels."""
    shutil.copytree(BUILTIN, tmp_path / "model")
    changed(tmp_path / "model" / "config.json", num_labels=10**12)
    assert len(load_tokenizer(tmp_path / "model")) == 1088


def test_folder_of_gguf_files_is_refused_with_their_names(tmp_path):
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(
        UserError, match=r"has no config\.json; pass one of its GGUF files: a\.gguf, b\.gguf$"
    ):
        find_model(tmp_path)


def test_hub_id_without_a_network_is_refused():
    message = error("some-owner/some-model")
    assert "some-owner/some-model: no such folder here" in message
    assert "the hub cannot be reached" in message
    assert "pass the path of a folder" in message
