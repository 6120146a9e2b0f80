"""Test `python -m kvjax.export`: any checkpoint gives the files that a run itself exports, complete or not at all, and
can be named in several ways."""

import json

import jax
import numpy as np
import pytest

from kvjax import export as command
from kvjax.builtin import builtin_model
from kvjax.checkpoints.folder import describe, exported_files
from kvjax.errors import UserError
from kvjax.mesh import make_mesh
from kvjax.models import load_model
from kvjax.policies import make_policy
from kvjax.train.config import parse
from kvjax.train.run import export_checkpoint, train


def arguments(method, folder):
    """Return the arguments of a run of four updates that keeps all checkpoints."""
    return [
        *(
            "--method",
            method,
            "--model",
            str(builtin_model("test_model")),
            "--dtype",
            "float32",
            "--mesh",
            "2",
        ),
        *("--lengths", "64", "--window", "8", "--batch", "4", "--sequences", "16", "--checkpoint-every", "1"),
        *("--validation", "2", "--keep", "9", "--report", "none", "--out", str(folder)),
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the folder of a run of write gates."""
    return train(parse(arguments("wgkv", tmp_path_factory.mktemp("runs") / "run"))).folder


def contents(folder):
    return {name: (folder / name).read_bytes() for name in ("gates.safetensors", "config.json")}


@pytest.mark.slow
def test_exporting_the_last_checkpoint_repeats_the_runs_export(run, tmp_path, capsys):
    before = contents(run / "gates")
    command.main([str(run), "--out", str(tmp_path / "new" / "gates")])
    assert contents(tmp_path / "new" / "gates") == before
    assert (tmp_path / "new" / "gates" / "orbax").is_dir()
    output = capsys.readouterr().out
    assert output.startswith("step 4: held out (2 sequences): ")
    assert output.endswith(f"gates: {tmp_path}/new/gates\n")
    command.main([str(run), "--mesh", "1"])
    assert contents(run / "gates")["gates.safetensors"] == before["gates.safetensors"]
    assert sorted(path.name for path in run.iterdir()) == [
        *(".lock", "checkpoints", "config.yaml", "gates", "metrics.jsonl")
    ]


@pytest.mark.slow
def test_an_earlier_checkpoint_gives_the_parameters_of_its_step(run, tmp_path):
    """The exported validation numbers are those of the checkpoint's step."""
    exported, step, folder = export_checkpoint(parse(["--resume", "--out", str(run)]), 2, tmp_path / "gates")
    assert (step, folder) == (2, tmp_path / "gates")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (numbers,) = (line["validation"] for line in lines if line["step"] == 1 and "validation" in line)
    assert describe(folder)["validation"] == pytest.approx(numbers, rel=1e-5)
    last, *_ = export_checkpoint(parse(["--resume", "--out", str(run)]), 4, tmp_path / "last")
    assert not np.array_equal(exported.params.w1[...], last.params.w1[...])
    with jax.set_mesh(make_mesh()):
        model = load_model(builtin_model("test_model"))
        policy = make_policy("wgkv", gates=folder, model=model)
    np.testing.assert_array_equal(policy.admission.gates.w1[...], exported.params.w1[...])


def test_a_failed_export_keeps_the_previous_one(run, monkeypatch):
    before = contents(run / "gates")

    def fails(*_):
        raise UserError("the disk is full")

    names = sorted(file.name for file in run.iterdir())
    monkeypatch.setattr("kvjax.train.run.export", fails)
    with pytest.raises(UserError, match="the disk is full"):
        command.main([str(run), "--step", "1"])
    assert contents(run / "gates") == before
    assert sorted(file.name for file in run.iterdir()) == names, "no partial files are left"
    assert exported_files(run)[0].parent == run / "gates"


@pytest.mark.thorough
def test_a_trained_model_of_an_earlier_step_is_exported_whole(tmp_path):
    method = "tests.train.recipes.whole_model:WholeModel"
    folder = train(parse(arguments(method, tmp_path / "run"))).folder
    resumed = parse(["--resume", "--method", method, "--out", str(folder)])
    exported, _, into = export_checkpoint(resumed, 2, tmp_path / "first")
    for actual, expected in zip(
        jax.tree.leaves(load_model(into / "model", dtype="float32")),
        jax.tree.leaves(exported.model),
        strict=True,
    ):
        np.testing.assert_array_equal(actual, expected)


def test_impossible_exports_are_errors_of_one_line(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = parse(["--resume", "--out", str(run)])
    with pytest.raises(
        UserError, match=r"has no checkpoint of step 3000; it has those of steps \[1, 2, 3, 4\]"
    ):
        export_checkpoint(config, 3000, None)
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError, match="mine exists: name a new folder"):
        command.main([str(run), "--out", "~/mine"])
    with pytest.raises(UserError, match=f"^{tmp_path}/mine holds no run"):
        command.main(["~/mine"])
    with pytest.raises(UserError, match="^--mesh 3: the run in .* has 4 sequences .* round up to 6"):
        command.main([str(run), "--mesh", "3"])


def test_the_gates_of_a_run_are_found_by_the_runs_folder(run, tmp_path):
    assert exported_files(run) == exported_files(run / "gates")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(
        UserError, match=f"no gates.safetensors: python -m kvjax.export {tmp_path}/run exports"
    ):
        exported_files(tmp_path / "run")
    with pytest.raises(UserError, match=r"holds no gates: it has no gates.safetensors$"):
        exported_files(tmp_path)
