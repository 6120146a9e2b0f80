"""Tests of folder locks: one process holds a folder, and no longer than it lives."""

import signal
import subprocess
import sys

import pytest

from kvjax.builtin import builtin_model
from kvjax.cli.lock import FolderLock
from kvjax.errors import UserError
from kvjax.evaluate.__main__ import main as evaluate
from kvjax.train.__main__ import main as train
from tests.evaluate.inputs import SMALL

pytestmark = pytest.mark.slow

HOLD = """
import sys, time
from pathlib import Path
from kvjax.cli.lock import FolderLock
with FolderLock(Path(sys.argv[1]), "--out"):
    print("held", flush=True)
    time.sleep(600)
"""
BUSY = "--out .*run: another process is writing there; wait for its end, or name another folder"


def test_killed_process_releases_the_folder(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=BUSY), FolderLock(folder, "--out"):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    with FolderLock(folder, "--out"):
        pass


def test_missing_folder_is_locked_once_it_is_made(tmp_path):
    folder = tmp_path / "run"
    with FolderLock(folder, "--out") as first:
        assert not folder.exists()
        folder.mkdir()
        first.take()
        with pytest.raises(UserError, match=BUSY), FolderLock(folder, "--out"):
            pass
        with FolderLock(folder, "--out", wanted=False):
            pass
    with FolderLock(folder, "--out"):
        pass


@pytest.mark.thorough
def test_second_evaluation_in_a_folder_is_refused(tmp_path):
    command = [*SMALL, "--policies", "full", "--tasks", "needle", "--out", str(tmp_path / "run")]
    evaluate(command)
    with FolderLock(tmp_path / "run", "--out"), pytest.raises(UserError, match=BUSY):
        evaluate(command)
    evaluate(command)


def test_second_training_run_in_a_folder_is_refused(tmp_path):
    model = ["--model", str(builtin_model("test_model")), "--lengths", "64", "--shares", "1", "--window", "8"]
    few = ["--sequences", "1", "--validation", "1", "--report", "none", "--out", str(tmp_path / "run")]
    train([*model, *few])
    with FolderLock(tmp_path / "run", "--out"), pytest.raises(UserError, match=BUSY):
        train(["--resume", "--out", str(tmp_path / "run")])
    train(["--resume", "--out", str(tmp_path / "run")])
