"""Tests of safetensors files that cannot be read."""

import json
import os

import pytest

from tests.models.cases import LLAMA, write_folder
from tests.models.refusals import error


@pytest.mark.parametrize("kept", [0, 5, 300, -1])
def test_truncated_file_is_refused(kept, tmp_path):
    file = write_folder(tmp_path, LLAMA) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert error(tmp_path).startswith(f"{file}: not a whole safetensors file")


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n",
            "a Git LFS pointer, not the weights",
        ),
        (b"<!DOCTYPE html>", "a web page"),
        (b"PK\3\4", "a PyTorch file"),
        (b"GGUF\3", "a GGUF file"),
    ],
)
def test_other_files_are_named_by_kind(content, kind, tmp_path):
    file = write_folder(tmp_path, LLAMA) / "model.safetensors"
    file.write_bytes(content)
    assert error(tmp_path).startswith(f"{file}: {kind}")


def test_huge_header_is_not_parsed(tmp_path):
    file = write_folder(tmp_path, LLAMA) / "model.safetensors"
    file.write_bytes((60 << 20).to_bytes(8, "little"))
    os.truncate(file, 61 << 20)
    assert error(tmp_path) == f"{file}: its header has 62,914,560 bytes, expected at most 8,388,608"


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (os.mkfifo, "is a pipe or a device, expected a file"),
        (os.mkdir, "is a folder, expected a file"),
        (lambda path: path.symlink_to("/dev/zero"), "is a pipe or a device, expected a file"),
        (lambda path: path.symlink_to("x"), "cannot be read (No such file or directory)"),
    ],
)
def test_only_regular_files_are_opened(make, reason, name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    make(tmp_path / name)
    assert error(tmp_path) == f"{tmp_path / name}: {reason}"
