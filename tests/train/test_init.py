"""Test runs that begin with existing gates, and the errors before such a run starts."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

from kvjax.builtin import builtin_model
from kvjax.checkpoints.folder import describe
from kvjax.errors import UserError
from kvjax.mesh import use_mesh
from kvjax.models import read_config
from kvjax.policies.admission.wgkv import WriteGate, load_gates, save_gates
from kvjax.policies.admission.wgkv.files import Sizes
from kvjax.train.checkpoints import Checkpoints
from kvjax.train.config import parse, prepare_folder
from kvjax.train.run import check, export_checkpoint, train
from tests.checkpoints.torch_files import write_torch
from tests.policies.admission.wgkv.published import published_arrays

MODEL = builtin_model("test_model")
SHAPE = read_config(MODEL)
SIZES = Sizes(SHAPE.num_layers, SHAPE.num_kv_heads, SHAPE.head_dim, 1.5)
ARGS = [
    *("--model", str(MODEL), "--data", "builtin", "--lengths", "64", "--window", "8", "--batch", "8"),
    *(
        "--checkpoint-every",
        "1",
        "--validation",
        "2",
        "--report",
        "none",
        "--dtype",
        "float32",
        "--mesh",
        "4x2",
    ),
]


@pytest.fixture
def published(tmp_path):
    """Return the authors' file for the model."""
    file = tmp_path / "gates.pt"
    _, heads, head_dim, width = SIZES.shape
    arrays = published_arrays(layers=SIZES.layers, kv_heads=heads, head_dim=head_dim, width=width)
    write_torch(file, arrays, parameters=True)
    return file


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "validation" not in line]


class Stopped(BaseException):
    """An exception in place of a stopped process."""


@pytest.mark.thorough
def test_a_run_starts_from_gates_and_resumes_without_their_file(published, tmp_path, monkeypatch):
    """The first update has rate 0, so the gates after it are the initial ones. A run of two updates that is stopped
    there and resumed without the file ends like an uninterrupted one."""
    file, save = published, Checkpoints.save
    expected = jax.device_get(load_gates(file)[0])
    run = [*ARGS, "--init", str(file), "--sequences", "16", "--out"]
    uninterrupted, folder = train(parse([*run, str(tmp_path / "whole")])), tmp_path / "stopped"

    def stopped_after_the_first(self, step, *args):
        save(self, step, *args)
        self._manager.wait_until_finished()
        raise Stopped

    monkeypatch.setattr(Checkpoints, "save", stopped_after_the_first)
    with pytest.raises(Stopped):
        train(parse([*run, str(folder)]))
    monkeypatch.setattr(Checkpoints, "save", save)
    file.unlink()
    resume_config = parse(["--resume", "--out", str(folder)])
    assert (resume_config.init_, resume_config.expand) == (str(file), 1.5)
    export_checkpoint(resume_config, 1, tmp_path / "first")
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(load_gates(tmp_path / "first")[0]), expected)
    assert describe(tmp_path / "first")["init"] == str(file)
    resumed = train(resume_config)
    assert losses(folder) == losses(uninterrupted.folder)
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((resumed.params, uninterrupted.params)))
    assert not np.array_equal(uninterrupted.params.w1[...], expected.w1[...])


@pytest.mark.slow
def test_a_resume_without_a_checkpoint_needs_the_initial_gates(published, tmp_path):
    prepare_folder(parse([*ARGS, "--init", str(published), "--out", str(tmp_path / "run")]))
    published.unlink()
    with pytest.raises(UserError, match=r"--init .*gates.pt: cannot be read \(No such file"):
        train(parse(["--resume", "--out", str(tmp_path / "run")]))


def test_the_width_comes_from_the_initial_gates_by_default(published, tmp_path):
    """They also override the built-in config; its own gates have its width."""
    check(parse(["--init", "builtin"]))
    assert parse([*ARGS, "--init", str(published)]).expand == 1.5
    assert parse(["--config", "builtin", "--init", str(published)]).expand == 1.5
    (tmp_path / "own.yaml").write_text(f"init: {published}\nmodel: {MODEL}\n")
    assert parse(["--config", str(tmp_path / "own.yaml")]).expand == 1.5
    with use_mesh():
        gates = WriteGate(*SIZES[:3], expand=2.0, rngs=nnx.Rngs(0))
    save_gates(tmp_path / "gates", gates, {})
    assert parse([*ARGS, "--init", str(tmp_path / "gates")]).expand == 2
    check(parse([*ARGS, "--init", str(tmp_path / "gates")]))


def refusal(*args):
    with pytest.raises(UserError) as caught:
        check(parse([*ARGS, *args]))
    return str(caught.value)


def test_gates_of_another_shape_are_refused_before_a_run_starts(published, tmp_path):
    assert "has gates of (layers, kv heads, head_dim, hidden width) = " in refusal(
        "--init", str(published), "--expand", "4"
    )
    assert refusal("--init", str(tmp_path / "none")).startswith(f"--init {tmp_path}/none holds no gates")
    assert "cannot be read (No such file" in refusal("--init", str(tmp_path / "none.pt"))
    arrays = published_arrays(layers=2, kv_heads=1, head_dim=8, width=12)
    write_torch(tmp_path / "other.pt", arrays)
    assert "= (2, 1, 8, 12), this run trains" in refusal("--init", str(tmp_path / "other.pt"))
    arrays.popitem()
    write_torch(tmp_path / "less.pt", arrays)
    assert "layer 1: conv2.bias should have shape (1,), found nothing" in refusal(
        "--init", str(tmp_path / "less.pt")
    )
