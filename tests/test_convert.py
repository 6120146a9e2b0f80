"""Tests of `python -m kvjax.convert`: the files that it writes, for every input format."""

import gc
import json
import shutil

import pytest
from transformers import AutoTokenizer

from kvjax import convert
from kvjax.convert import main
from kvjax.errors import UserError
from kvjax.models import load_model, load_tokenizer, read_config
from tests.models.cases import CASES, IDS, weights, write_folder
from tests.models.files import assert_equal
from tests.models.gguf_cases import write_gguf
from tests.models.gguf_tokenizers import metadata_of, published

CASE = CASES["llama31"] | IDS


def run(*args) -> None:
    main([str(arg) for arg in args])


def refused(*args) -> str:
    with pytest.raises(UserError) as caught:
        run(*args)
    return str(caught.value)


@pytest.fixture
def file(tmp_path):
    pairs = metadata_of(published("smollm"), "smollm")
    return write_gguf(tmp_path / "model.gguf", CASE, weights(CASE), metadata=pairs)


def test_gguf_file_becomes_its_source_folder(file, tmp_path):
    original, out = write_folder(tmp_path / "original", CASE), tmp_path / "out"
    run(file, out)
    assert sorted(path.name for path in out.iterdir()) == [
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    ]
    assert read_config(out) == read_config(original)
    assert_equal(load_model(out), load_model(original))
    text = "In 2023, 12 eggs <|im_end|>"
    assert AutoTokenizer.from_pretrained(out)(text) == load_tokenizer(file)(text)
    assert "<|im_end|>" in json.loads((out / "tokenizer_config.json").read_text())["chat_template"]


def test_orbax_export_round_trips(file, tmp_path):
    run(file, tmp_path / "export", "--to", "orbax", "--dtype", "bfloat16")
    assert not list((tmp_path / "export").glob("*.safetensors"))
    run(tmp_path / "export", tmp_path / "back")
    run(file, tmp_path / "straight", "--dtype", "bfloat16")
    assert_equal(load_model(tmp_path / "back"), load_model(tmp_path / "straight"))
    for path in (tmp_path / "straight").iterdir():
        assert path.read_bytes() == (tmp_path / "back" / path.name).read_bytes(), path.name
    run(tmp_path / "export", tmp_path / "wide", "--dtype", "float32")
    assert_equal(load_model(tmp_path / "wide", "bfloat16"), load_model(tmp_path / "back"))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_head_that_differs_from_the_embedding_is_kept(tmp_path):
    tied = CASE | {"tie_word_embeddings": True}
    folder = write_folder(tmp_path / "original", tied, weights(CASE))
    run(folder, tmp_path / "straight")
    run(folder, tmp_path / "export", "--to", "orbax")
    run(tmp_path / "export", tmp_path / "back")
    for name in ("straight", "back"):
        assert_equal(load_model(tmp_path / name), load_model(write_folder(tmp_path / "untied", CASE)))
        assert json.loads((tmp_path / name / "config.json").read_text())["tie_word_embeddings"] is False


def test_overflowing_export_is_refused(tmp_path):
    tensors = weights(CASE)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = 1e5
    run(write_folder(tmp_path / "original", CASE, tensors), tmp_path / "export", "--to", "orbax")
    message = refused(tmp_path / "export", tmp_path / "new", "--dtype", "float16")
    assert "NaN or infinite numbers in layers.up.value, read as float16" in message


def test_missing_arguments_are_named():
    assert refused() == "missing: SOURCE, OUT; --help says more"
    assert refused("a.gguf") == "missing: OUT; --help says more"


def test_refused_conversions_leave_nothing_behind(file, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "kept").touch()
    assert refused(file, out) == f"{out}: exists and is not an empty folder, give another one"
    assert refused(tmp_path / "none.gguf", tmp_path / "new") == f"{tmp_path / 'none.gguf'}: no such file"
    assert "dtype 'float8' is not supported" in refused(file, tmp_path / "new", "--dtype", "float8")
    # the model is complete, its tokenizer is not
    write_gguf(file, CASE, weights(CASE))
    assert "tokenizer.ggml.model is missing" in refused(file, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "out"]


@pytest.mark.parametrize("place", ["model.gguf/out", "model.gguf/deeper/out", "/proc/out", "x" * 250])
def test_impossible_output_folder_is_refused_before_reading(place, file, tmp_path):
    out = tmp_path / place
    line = refused(tmp_path / "none.gguf", out)
    parent = "/proc" if place == "/proc/out" else file if "gguf" in place else tmp_path
    assert line.startswith(f"{out}: no folder can be made there ({parent}: ")
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_leftovers_of_a_killed_conversion_are_removed(file, tmp_path):
    left = tmp_path / ".out.partial-4711"
    left.mkdir()
    (left / "config.json").touch()
    run(file, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "out"]


def test_first_of_two_conversions_to_one_folder_wins(file, tmp_path, monkeypatch):
    out, load = tmp_path / "out", convert._read

    def overtaken(config):
        monkeypatch.setattr(convert, "_read", load)
        run(file, out, "--dtype", "bfloat16")
        return load(config)

    monkeypatch.setattr(convert, "_read", overtaken)
    assert refused(file, out) == f"{out}: exists and is not an empty folder, give another one"
    assert load_model(out).dtype == "bfloat16"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "out"]


# Orbax abandons its other reads when one fails
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_damaged_exports_are_refused(file, tmp_path):
    export = tmp_path / "export"
    run(file, export, "--to", "orbax")
    config = json.loads((export / "config.json").read_text())
    (export / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    message = refused(export, tmp_path / "new")
    assert message.startswith(f"{export / 'orbax'}: the export is another model's: ")
    assert "has shape (3, 80, 48), this run needs (3, 96, 48)" in message
    (export / "config.json").write_text(json.dumps(config))
    for lost in ("d", "_METADATA"):
        path = export / "orbax" / lost
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        assert refused(export, tmp_path / "new").startswith(f"{export / 'orbax'}: not a whole Orbax export")
    gc.collect()  # otherwise another test would get the warnings
