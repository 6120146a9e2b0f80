"""Test that a run saves its state before the batch system ends it."""

import re
import signal

import pytest

from kvjax.cli.launch import Termination
from kvjax.train import run
from kvjax.train.checkpoints import saved_steps
from kvjax.train.config import parse
from kvjax.train.run import train
from tests.processes import TRAIN, run_processes
from tests.train.killed import go_on
from tests.train.short_run import ARGS, losses, written

SIGNALLED = """
import signal

import jax

from kvjax.train import run

made, make_update = [], run.make_update

def making(*args):
    update = make_update(*args)

    def signalled(*args):
        made.append(1)
        if len(made) == 3 and jax.process_index() == jax.process_count() - 1:
            signal.raise_signal(signal.SIGTERM)
        return update(*args)

    signalled.lower = update.lower
    return signalled

run.make_update = making
"""
"""Code that sends SIGTERM to the last process in its third update."""


@pytest.mark.slow
def test_sigterm_saves_the_current_step(tmp_path, monkeypatch):
    uninterrupted = train(parse([*ARGS, "--mesh", "1", "--out", str(tmp_path / "whole")]))
    monkeypatch.setattr(run, "make_update", run.make_update)
    exec(SIGNALLED, {})
    before, folder = signal.getsignal(signal.SIGTERM), tmp_path / "run"
    with pytest.raises(Termination, match="the last checkpoint is of step 3: .* goes on from there"):
        train(parse([*ARGS, "--checkpoint-every", "100", "--mesh", "1", "--out", str(folder)]))
    assert signal.getsignal(signal.SIGTERM) == before
    assert saved_steps(folder / "checkpoints") == [3]
    monkeypatch.undo()
    go_on(folder, "1")
    assert losses(folder) == losses(uninterrupted.folder)


@pytest.mark.slow
def test_two_processes_save_the_same_step_and_one_resumes(tmp_path):
    args = [
        *ARGS[: ARGS.index("--sequences")],
        "--sequences",
        "800",
        "--checkpoint-every",
        "1000",
        *ARGS[-4:],
    ]
    folder, uninterrupted = (
        tmp_path / "run",
        train(parse([*args, "--mesh", "1", "--out", str(tmp_path / "whole")])),
    )
    _, outputs = run_processes(SIGNALLED + TRAIN, *args, "--mesh", "2", "--out", str(folder), exit_code=143)
    (step,) = saved_steps(folder / "checkpoints")
    for text in outputs:
        assert re.search(
            rf"stopped by SIGTERM: the last checkpoint is of step {step}: .* goes on from there", text
        )
    assert 3 <= len(written(folder)[0]) == step < 100
    go_on(folder, "1")
    for actual, expected in zip(written(folder)[0], written(uninterrupted.folder)[0], strict=True):
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-4)
