"""Tests of JSON files that are faulty or not regular files."""

import json
import os

import pytest

from kvjax.errors import UserError
from kvjax.models import read_config
from tests.models.cases import LLAMA


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"cannot be read as JSON \(Expecting"),
        ("[]", "expected a JSON object, got list"),
        ('{"a":' * 100_000, r"cannot be read as JSON \(nested too deeply\)$"),
        ('{"a": %s}' % ("9" * 5000), r"cannot be read as JSON \(Exceeds the limit"),
        (b'{"a": "\xe9"}', "is not UTF-8 text: byte 0xe9 at offset 7; if it is Latin-1, convert it"),
        (b" " * (17 << 20), "has 17,825,792 bytes, expected at most 16,777,216$"),
    ],
    ids=["cut", "list", "nested", "digits", "latin-1", "large"],
)
def test_faulty_configs_are_refused(text, message, tmp_path):
    (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=message):
        read_config(tmp_path)


def test_byte_order_mark_is_accepted(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8-sig")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}', encoding="utf-8-sig")
    assert read_config(tmp_path).eos_ids == (5,)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_pipes_devices_and_folders_are_refused(kind, name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    file = tmp_path / name
    file.unlink(missing_ok=True)
    make = {"pipe": os.mkfifo, "device": lambda x: x.symlink_to("/dev/zero"), "folder": os.mkdir}[kind]
    make(file)
    with pytest.raises(
        UserError, match=rf"/{name}: (is not a regular file|cannot be read \(Is a directory\))$"
    ):
        read_config(tmp_path)
