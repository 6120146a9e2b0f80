"""Test the probes from the command line: methods of three kinds, each in one file that changes nothing else."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvjax import generate
from kvjax.builtin import builtin_model
from kvjax.train import __main__ as train

HERE = Path(__file__).parent
TRAINED = {
    "head_masks:HeadMasks": ["--window", "8", "--sink", "2"],
    "hidden_gate:HiddenGates": ["--entries", "24", "--every", "4"],
}
TRAINING = [
    *("--lengths", "64", "--shares", "1", "--batch", "4", "--sequences", "32", "--validation", "2"),
    *("--checkpoint-every", "4", "--report", "none", "--dtype", "float32"),
]
PROMPT = ["--prompt", "The city of " * 20, "--max-new-tokens", "12"]


MODEL = builtin_model("test_model")


def in_a_process(command, *args, folder, model=MODEL):
    """Run a command in its own process, from an empty folder, and return its stderr."""
    done = subprocess.run(
        [sys.executable, "-m", f"kvjax.{command}", "--model", str(model), *args],
        env=os.environ | {"PYTHONPATH": str(HERE.parents[1])},
        cwd=folder, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stderr


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Return a function that runs a command in this process, which has imported jax already."""
    monkeypatch.chdir(tmp_path)
    commands = {"train": train.main, "generate": generate.main}

    def called(command, *args, folder, model=MODEL):
        commands[command](["--model", str(model), *args])
        return capsys.readouterr().err

    return called


def entries_kept(text):
    return map(int, re.search(r"kept (\d+) of (\d+) entries", text).groups())


@pytest.mark.parametrize(
    "probe",
    [
        # PruLong's own tests train and run masks of heads
        pytest.param(x, marks=pytest.mark.thorough if "gate" in x or x.startswith("head_masks") else ())
        for x in TRAINED
    ],
)
def test_a_probe_trains_and_generates(probe, tmp_path, call):
    run = in_a_process if "gate" in probe else call
    method, options = f"tests.probes.{probe}", TRAINED[probe]
    run("train", "--method", method, *options, *TRAINING, "--out", str(tmp_path / "run"), folder=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    if "gate" in probe:
        assert losses[-1] < losses[0]
    gates = str(tmp_path / "run" / "parameters")
    trained_model = tmp_path / "run" / "parameters" / "model"  # exists if the run trained the model
    used = {"folder": tmp_path, "model": trained_model if trained_model.is_dir() else MODEL}
    kept, seen = entries_kept(run("generate", "--policy", method, "--gates", gates, *PROMPT, **used))
    if "gate" in probe:
        assert 24 <= kept < 24 + 4
    else:
        assert kept < seen


@pytest.mark.thorough
def test_guidance_generates_by_name(tmp_path, call):
    probe = "tests.probes.guidance:guided:ratio=0.5"
    whole = entries_kept(call("generate", "--policy", probe, *PROMPT, folder=tmp_path))
    parts = entries_kept(call("generate", "--policy", f"{probe},chunk=32", *PROMPT, folder=tmp_path))
    (kept, seen), (in_parts, _) = whole, parts
    assert kept == (seen - 11) // 2 + 11
    assert abs(in_parts - kept) <= 4


@pytest.mark.parametrize("file", sorted(HERE.glob("[a-z]*.py")), ids=lambda file: file.stem)
def test_a_probe_is_short(file):
    assert file.name.startswith("test_") or len(file.read_text().splitlines()) <= 80
