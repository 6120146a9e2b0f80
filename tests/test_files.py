"""Tests that files and folders are written completely or not at all."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from kvjax.files import partial_folder, write_tensors, write_text
from kvjax.policies.admission.wgkv import save_gates
from tests.tiny_models import tiny_gates, tiny_model

WRITER = """
import sys, time
from pathlib import Path
from kvjax.files import partial_folder
with partial_folder(Path(sys.argv[1])) as folder:
    (folder / "half").touch()
    print(folder, flush=True)
    time.sleep(60)
"""


def test_failed_write_leaves_the_old_file_alone(tmp_path):
    file = tmp_path / "config.yaml"
    write_text(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(file, "new \udc80")
    assert file.read_text() == "old"
    write_text(file, "new")
    assert file.read_text() == "new"
    assert list(tmp_path.iterdir()) == [file]


def test_new_file_does_not_overwrite(tmp_path):
    file = tmp_path / "config.yaml"
    write_text(file, "first", new=True)
    with pytest.raises(FileExistsError):
        write_text(file, "second", new=True)
    assert file.read_text() == "first"
    assert list(tmp_path.iterdir()) == [file]


def test_partial_folder_is_moved_or_removed(tmp_path):
    target = tmp_path / "new" / "out"
    with pytest.raises(FileNotFoundError), partial_folder(target) as folder:
        (folder / "missing").rename(target)
    assert list(target.parent.iterdir()) == []
    with partial_folder(target) as folder:
        (folder / "whole").touch()
        folder.rename(target)
    assert list(target.parent.iterdir()) == [target]
    # the permissions are those of any folder
    assert stat.S_IMODE(target.stat().st_mode) == stat.S_IMODE(target.parent.stat().st_mode)


def test_only_leftovers_of_killed_processes_are_removed(tmp_path):
    target = tmp_path / "out[1]"
    other = tmp_path / ".out.partial-1"
    other.mkdir()
    command = [sys.executable, "-c", WRITER, str(target)]
    with subprocess.Popen(
        command, cwd=Path(__file__).parent.parent, stdout=subprocess.PIPE, text=True
    ) as writer:
        try:
            theirs = Path(writer.stdout.readline().strip())
            with partial_folder(target) as ours:
                assert ours != theirs
                assert (theirs / "half").exists()
        finally:
            writer.kill()
    assert writer.returncode == -signal.SIGKILL
    assert set(tmp_path.iterdir()) == {theirs, other}
    with partial_folder(target) as ours:
        assert set(tmp_path.iterdir()) == {ours, other}
    assert list(tmp_path.iterdir()) == [other], "another target's"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_permissions_follow_the_umask(umask, mode, tmp_path):
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    before = os.umask(umask)
    try:
        write_tensors(tmp_path / "x.safetensors", {"x": x.T}, {"format": "pt"})
        save_gates(tmp_path / "gates", tiny_gates(tiny_model()), {})
    finally:
        os.umask(before)
    for file in (tmp_path / "x.safetensors", tmp_path / "gates" / "gates.safetensors"):
        assert stat.S_IMODE(file.stat().st_mode) == mode
    np.testing.assert_array_equal(load_file(tmp_path / "x.safetensors")["x"], x.T)
