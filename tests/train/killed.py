"""Runs that `SIGKILL` ends, each in its own process, and runs that resume them."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kvjax.train.config import parse
from kvjax.train.run import RunOutput, train

ROOT = Path(__file__).parents[2]

KILL = """
import os, signal

def kill():
    print("killed as told", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
SECOND_SAVE = """
import orbax.checkpoint as ocp

saves, save = [], ocp.JsonCheckpointHandler.async_save

async def killed_in_the_second(self, *args, **kwargs):
    saves.append(1)
    if len(saves) == 2:
        kill()
    return await save(self, *args, **kwargs)

ocp.JsonCheckpointHandler.async_save = killed_in_the_second
"""
"""Code that kills the run in the middle of its second checkpoint, after one that is complete."""
TRAIN = """
import sys
from kvjax.train.config import parse
from kvjax.train.run import train

train(parse(sys.argv[1:]))
"""


def run_until_killed(args: Sequence[str], folder: Path, when: str = SECOND_SAVE) -> Path:
    """Start a run with `args` and return its folder after it was killed. `when`: code that has something call
    `kill()`."""
    command = [sys.executable, "-c", KILL + when + TRAIN, *args, "--out", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=environment, cwd=folder.parent, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr[-2000:]
    assert "killed as told" in ended.stdout
    return folder


def go_on(folder: Path, mesh: str) -> RunOutput:
    """Resume the same run from its last checkpoint to its end."""
    return train(parse(["--resume", "--out", str(folder), "--mesh", mesh]))
