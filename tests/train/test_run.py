"""Whole runs on the test-size model: what they leave, and that one which is killed ends like one which is not."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from kvjax.builtin import builtin_model
from kvjax.launch import MeshShape
from kvjax.mesh import make_mesh
from kvjax.models import load_model
from kvjax.policies import make_policy
from kvjax.train.config import parse
from kvjax.train.loop import train

ROOT = Path(__file__).parents[2]
ARGS = [
    *("--model", str(builtin_model("test_model")), "--data", "builtin", "--lengths", "64", "--shares", "1"),
    *("--batch", "8", "--window", "8", "--lambda", "0.3", "--lr", "1e-2", "--sequences", "48"),
    *("--checkpoint-every", "2", "--report", "none", "--dtype", "float32"),
]

KILLED = """
import os, signal, sys
import orbax.checkpoint as ocp
from kvjax.train.config import parse
from kvjax.train.loop import train

saves, save = [], ocp.JsonCheckpointHandler.async_save

async def killed_in_the_second(self, *args, **kwargs):
    saves.append(1)
    if len(saves) == 2:
        print("killed in a save", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return await save(self, *args, **kwargs)

ocp.JsonCheckpointHandler.async_save = killed_in_the_second
train(parse(sys.argv[1:]))
"""


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(6))
    return [line["loss"] for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    return train(parse([*ARGS, "--mesh", "8", "--out", str(folder)]))


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of a run that was killed in the middle of its second save."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    command = [sys.executable, "-c", KILLED, *ARGS, "--mesh", "8", "--out", str(folder)]
    ended = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=folder.parent, capture_output=True, text=True
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert "killed in a save" in ended.stdout
    return folder


def resumed(killed, tmp_path, mesh):
    shutil.copytree(killed, tmp_path / "run")
    return train(parse(["--resume", "--out", str(tmp_path / "run"), "--mesh", mesh]))


def test_a_killed_run_ends_like_one_that_was_not(whole, killed, tmp_path):
    assert (killed / "checkpoints" / "2").is_dir()
    assert len((killed / "metrics.jsonl").read_text().splitlines()) >= 3, (
        "it was further than its last checkpoint"
    )
    again = resumed(killed, tmp_path, "8")
    assert losses(again.folder) == losses(whole.folder)
    for mine, theirs in zip(jax.tree.leaves(again.gates), jax.tree.leaves(whole.gates), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_killed_run_goes_on_on_another_mesh(whole, killed, tmp_path):
    again = resumed(killed, tmp_path, "4x2")
    assert dict(again.mesh.shape) == {"data": 1, "fsdp": 4, "tensor": 2}
    assert losses(again.folder) == pytest.approx(losses(whole.folder), rel=1e-5)


def test_a_run_leaves_gates_that_make_policy_loads(whole):
    mesh = make_mesh(tensor=2)
    with jax.set_mesh(mesh):
        model = load_model(builtin_model("test_model"))
        policy = make_policy("wgkv", model=model, gates=whole.folder / "gates")
    assert policy.window == 8
    for mine, theirs in zip(
        jax.tree.leaves(policy.admission.gates), jax.tree.leaves(whole.gates), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)
    described = json.loads((whole.folder / "gates" / "config.json").read_text())
    assert (described["lambda"], described["tau"], described["window"]) == (0.3, 0.1, 8)
    assert np.shape(described["rate"]) == whole.gates.b2.shape
    assert (whole.folder / "gates" / "orbax").is_dir()


def test_a_finished_run_is_left_as_it_is(whole):
    before = (whole.folder / "metrics.jsonl").read_text()
    again = train(parse(["--resume", "--out", str(whole.folder), "--mesh", str(MeshShape(fsdp=8))]))
    assert (whole.folder / "metrics.jsonl").read_text() == before
    np.testing.assert_array_equal(again.gates.w1[...], whole.gates.w1[...])


def test_two_processes_train_like_one(whole, tmp_path):
    """A device each, with half the rows."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    args = [*ARGS, "--mesh", "2", "--out", str(tmp_path / "run")]
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": "2",
    }
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "kvjax.train", *args],
            env=env | {"JAX_PROCESS_ID": str(index)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        said = [process.communicate(timeout=200)[1] for process in both]
    finally:
        for process in both:
            process.kill()
            process.wait()
    assert [process.returncode for process in both] == [0, 0], said
    assert losses(tmp_path / "run") == pytest.approx(losses(whole.folder), rel=1e-5)
    assert (tmp_path / "run" / "gates" / "gates.safetensors").is_file()
