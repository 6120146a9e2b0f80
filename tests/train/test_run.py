"""Test whole runs on the test-size model: their files, and that a killed run ends like an uninterrupted one."""

import importlib.util
import json
import re
import shlex
import shutil

import datasets
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.builtin import builtin_model
from kvjax.cli.launch import Termination
from kvjax.errors import UserError
from kvjax.mesh import make_mesh
from kvjax.models import load_model
from kvjax.policies import make_policy
from kvjax.train.__main__ import summary
from kvjax.train.checkpoints import Checkpoints
from kvjax.train.config import SAVED, parse
from kvjax.train.metrics import FINITE
from kvjax.train.recipe import Validation
from kvjax.train.recipes.wgkv import WriteGates
from kvjax.train.run import train
from tests.processes import TRAIN, run_processes
from tests.train.killed import go_on, run_until_killed
from tests.train.short_run import ARGS, losses, stopping_after, written


def logged(validation):
    """Return a validation in the form of metrics.jsonl and the exported gates."""
    return validation.numbers | {"sequences": validation.sequences}


@pytest.fixture(scope="module")
def saves():
    """Return the steps that were on disk when each checkpoint of the run `full_run` was saved; that run fills it."""
    return {}


@pytest.fixture(scope="module")
def full_run(tmp_path_factory, saves):
    folder, save = tmp_path_factory.mktemp("whole") / "run", Checkpoints.save

    def noted(self, step, *args):
        saves[step] = [line["step"] for line in written(folder)[0]]
        save(self, step, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", noted)
        return train(parse([*ARGS, "--mesh", "1", "--out", str(folder)]))


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Return the folder of a run that was killed in the middle of its second save."""
    return run_until_killed([*ARGS, "--mesh", "1"], tmp_path_factory.mktemp("killed") / "run")


def resumed(killed, tmp_path, mesh):
    return go_on(shutil.copytree(killed, tmp_path / "run"), mesh)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", pytest.param("fp8", marks=pytest.mark.thorough)])
def test_gates_train_on_a_model_in_eight_bits(weights, full_run, tmp_path):
    """The losses are close to those on the model itself; the first is measured before any update."""
    train(parse([*ARGS, "--weights", weights, "--mesh", "1", "--out", str(tmp_path / "run")]))
    actual, expected = np.array(losses(tmp_path / "run")), np.array(losses(full_run.folder))
    assert actual[0] != expected[0]
    np.testing.assert_allclose(actual, expected, rtol=0.05)


@pytest.mark.slow
def test_a_checkpoint_comes_after_the_metrics_of_its_steps(full_run, saves):
    assert saves == {step: list(range(step)) for step in (2, 4, 6)}


@pytest.mark.thorough
def test_a_run_killed_after_a_checkpoint_has_every_step(full_run, tmp_path, monkeypatch):
    """The run is killed between the complete checkpoint of step 4 and the next update."""
    folder, save = tmp_path / "run", Checkpoints.save

    class Killed(BaseException):
        pass

    def killed_after_the_second(self, step, *args):
        save(self, step, *args)
        if step == 4:
            self._manager.wait_until_finished()
            raise Killed

    monkeypatch.setattr(Checkpoints, "save", killed_after_the_second)
    with pytest.raises(Killed):
        train(parse([*ARGS, "--mesh", "1", "--out", str(folder)]))
    monkeypatch.setattr(Checkpoints, "save", save)
    resumed_run = train(parse(["--resume", "--out", str(folder), "--mesh", "1"]))
    assert losses(folder) == losses(full_run.folder)
    assert written(folder)[1] == written(full_run.folder)[1]
    np.testing.assert_array_equal(resumed_run.params.w1[...], full_run.params.w1[...])


@pytest.mark.slow
def test_a_killed_run_ends_like_an_uninterrupted_one(full_run, killed, tmp_path):
    assert (killed / "checkpoints" / "2").is_dir()
    assert [line["step"] for line in written(killed)[0]] == [0, 1, 2, 3], "as far as the checkpoint under way"
    resumed_run = resumed(killed, tmp_path, "1")
    assert losses(resumed_run.folder) == losses(full_run.folder)
    for actual, expected in zip(
        jax.tree.leaves(resumed_run.params), jax.tree.leaves(full_run.params), strict=True
    ):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.thorough
def test_a_killed_run_resumes_on_another_mesh(full_run, killed, tmp_path):
    resumed_run = resumed(killed, tmp_path, "4x2")
    assert dict(resumed_run.mesh.shape) == {"data": 1, "fsdp": 4, "tensor": 2, "sequence": 1, "replica": 1}
    assert losses(resumed_run.folder) == pytest.approx(losses(full_run.folder), rel=1e-5)


def test_a_run_exports_gates_that_make_policy_loads(full_run):
    mesh = make_mesh(tensor=2)
    with jax.set_mesh(mesh):
        model = load_model(builtin_model("test_model"))
        policy = make_policy("wgkv", model=model, gates=full_run.folder / "gates")
    assert policy.window == 8
    for actual, expected in zip(
        jax.tree.leaves(policy.admission.gates), jax.tree.leaves(full_run.params), strict=True
    ):
        np.testing.assert_array_equal(actual, expected)
    described = json.loads((full_run.folder / "gates" / "config.json").read_text())
    assert (described["lambda"], described["tau"], described["window"]) == (0.3, 0.1, 8)
    assert (described["sequences"], described["batch"], described["lengths"]) == (48, 8, [64])
    rates = full_run.validation.by_sequence["rates"]
    np.testing.assert_allclose(described["rate"], rates.mean(0), atol=1e-4)
    np.testing.assert_allclose(described["peak_rate"], rates.max(0), atol=1e-4)
    np.testing.assert_allclose(policy.admission.rate, rates.max(0), atol=1e-4)
    assert rates.shape == (8, *full_run.params.b2.shape)
    assert (full_run.folder / "gates" / "orbax").is_dir()


def test_a_run_is_validated_with_each_checkpoint_and_at_the_end(full_run):
    _, validations = written(full_run.folder)
    assert list(validations) == [1, 3, 5]
    described = json.loads((full_run.folder / "gates" / "config.json").read_text())["validation"]
    assert described == validations[5] == logged(full_run.validation)
    assert set(described) == {
        *("distillation", "hard_distillation", "gate", "admitted", "kv_size", "sequences")
    }
    assert validations[1]["gate"] > validations[5]["gate"], "λ closes the gates"


@pytest.mark.thorough
def test_validate_every_sets_the_interval_of_validations(full_run, tmp_path):
    args = ["--validate-every", "3", "--validation", "3", "--mesh", "4x2", "--out", str(tmp_path / "run")]
    run = train(parse([*ARGS, *args]))
    _, validations = written(run.folder)
    assert list(validations) == [2, 5]
    assert run.validation.sequences == 3
    # these are the first three of the same sequences, on another mesh
    rates, first = (x.validation.by_sequence["rates"] for x in (run, full_run))
    assert rates == pytest.approx(first[:3], abs=0.05)


def test_the_summary_names_the_export_and_its_use(full_run):
    config = parse(["--resume", "--out", str(full_run.folder), "--mesh", "1"])
    text, numbers = (
        summary(config, full_run, config.deploy(full_run.params, full_run.model)),
        full_run.validation.numbers,
    )
    for part in (
        f"gates: {full_run.folder}/gates", "held out (8 sequences): ",
        *(f"{name} {value:.4g}" for name, value in numbers.items()),
        f"at τ 0.1 they admit {100 * numbers['admitted']:.1f}% of the tokens", f"--model {config.model}",
        "kvjax.generate", f"--policy wgkv --gates {full_run.folder}/gates",
    ):  # fmt: skip
        assert part in text, part


@pytest.mark.parametrize("broken", ["loss", "gradient", "gates"])
def test_a_run_that_diverges_stops_and_keeps_its_last_good_checkpoint(broken, tmp_path, monkeypatch):
    folder, updates = tmp_path / "run", []

    def make_update(*args, **options):
        def update(state, model, batch, step):
            updates.append(1)
            bad = len(updates) == 4
            if bad and broken == "gates":
                state.params.b2[...] = state.params.b2[...] * jnp.nan
            loss = jnp.float32(jnp.nan if bad and broken == "loss" else 1.0)
            return state, {"loss": loss, FINITE: jnp.bool_(not (bad and broken == "gradient"))}

        return update

    validation = Validation({"distillation": 1.0}, {"rates": np.zeros((1, 2, 4))}, 1)
    monkeypatch.setattr("kvjax.train.run.make_update", make_update)
    monkeypatch.setattr("kvjax.train.memory.check", lambda *_: 0)  # the replaced update cannot be compiled
    monkeypatch.setattr("kvjax.train.loop.make_validate", lambda *args: lambda state, model: validation)
    problems = {"loss": "loss is nan", "gradient": "the gradient is not finite"}
    problem = problems.get(broken, "the parameters are no longer finite")
    with pytest.raises(
        UserError,
        match=f"^step 4 of 6: {problem}: the run is stopped and exports nothing; the last good checkpoint is of step "
        f"2, in {folder}/checkpoints: python -m kvjax.export {folder} exports it. If weights and data are right, start "
        "another run with a smaller --lr than 0.01$",
    ):
        train(parse([*ARGS, "--mesh", "1", "--out", str(folder)]))
    assert [file.name for file in (folder / "checkpoints").iterdir()] == ["2"]
    assert not (folder / "gates").exists()


@pytest.mark.slow
def test_a_learning_rate_that_is_far_too_high_ends_in_one_line(tmp_path):
    """The error is not simulated: the weights of the gates grow until they are not finite."""
    folder = tmp_path / "run"
    with pytest.raises(
        UserError, match=r"^step \d of 6: .*no checkpoint before it.* smaller --lr than 1e\+36$"
    ):
        train(parse([*ARGS, "--lr", "1e36", "--mesh", "1", "--out", str(folder)]))
    assert not (folder / "gates").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--data", "no-such-data"], "--data no-such-data: no such file or folder"),
        (["--data", "{files}/empty"], "has no .txt"),
        (["--data", "{files}/short.jsonl"], "no document has 64 or more tokens"),
        (["--model", "{files}/cut"], "model.safetensors"),
        (["--tensorboard"], "needs tensorboardX"),
        (["--mesh", "64"], "needs 64 devices"),
        (["--lr", "1e36"], "is not finite|is nan|is inf|no longer finite"),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "",
)
def test_a_launch_that_fails_does_not_block_the_next(wrong, message, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.jsonl").write_text('{"text": "short"}\n')
    shutil.copytree(builtin_model("test_model"), tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    find_spec = importlib.util.find_spec
    find_other_spec = lambda name, *args_: None if name == "tensorboardX" else find_spec(name, *args_)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", find_other_spec)
    monkeypatch.setattr(datasets, "load_dataset", missing)
    args = [*ARGS, "--mesh", "1", "--out", str(folder)]
    with pytest.raises(UserError, match=message):
        train(parse([*args, *(part.format(files=tmp_path) for part in wrong)]))
    assert not (folder / SAVED).exists()
    assert parse(args).out == folder


def missing(*_, **__):
    raise FileNotFoundError


@pytest.mark.slow
def test_an_impossible_report_is_refused_before_the_start(tmp_path, capsys):
    method, common = "tests.probes.hidden_gate:HiddenGates", ARGS[: ARGS.index("--window")]
    args = ["--method", method, *common, "--sequences", "8", "--mesh", "1", "--out", str(tmp_path / "run")]
    with pytest.raises(
        UserError, match="--report full: there can be no report .hidden_gate compacts while it"
    ):
        train(parse([*args, "--report", "full"]))
    assert "step 1" not in capsys.readouterr().err
    train(parse(args))
    before, _ = capsys.readouterr().err.split("step 1/1")
    assert "there will be no report: hidden_gate compacts while it decodes" in before


@pytest.mark.slow
def test_a_run_that_fails_after_a_checkpoint_keeps_its_folder(tmp_path, monkeypatch):
    args = [*ARGS, "--mesh", "1", "--out", str(tmp_path / "run")]
    broken = ValueError("no export today")

    def fails(*_):
        raise broken

    monkeypatch.setattr(WriteGates, "export", fails)
    with pytest.raises(ValueError, match="no export today"):
        train(parse(args))
    with pytest.raises(UserError, match="already holds a run: pass --resume"):
        parse(args)
    monkeypatch.undo()
    assert (train(parse(["--resume", *args])).folder / "gates").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("updates", "message"),
    [
        (1, "there is no checkpoint yet: {command} begins again with the same options"),
        (3, "the last checkpoint is of step 2: {command} goes on from there"),
    ],
)
@pytest.mark.parametrize("stop", [KeyboardInterrupt, pytest.param(Termination, marks=pytest.mark.thorough)])
def test_a_run_that_is_stopped_says_how_to_go_on(stop, updates, message, tmp_path, monkeypatch):
    folder = tmp_path / "a run"
    monkeypatch.setattr("kvjax.train.run.make_update", stopping_after(updates, stop))
    command = f"python -m kvjax.train --resume --out '{folder}'"
    with pytest.raises(stop, match=f"^{re.escape(message.format(command=command))}$"):
        train(parse([*ARGS, "--mesh", "1", "--out", str(folder)]))
    assert parse(shlex.split(command)[3:]).resume


def test_resuming_a_finished_run_changes_nothing(full_run):
    before = (full_run.folder / "metrics.jsonl").read_text()
    resumed_run = train(parse(["--resume", "--out", str(full_run.folder), "--mesh", "1"]))
    assert (full_run.folder / "metrics.jsonl").read_text() == before
    np.testing.assert_array_equal(resumed_run.params.w1[...], full_run.params.w1[...])


@pytest.mark.thorough
def test_two_processes_train_like_one(full_run, tmp_path):
    """Each process has half the rows."""
    args = [part for part in ARGS if part not in ("--report", "none")]
    _, outputs = run_processes(TRAIN, *args, "--mesh", "2", "--out", str(tmp_path / "run"))
    no_report = "there will be no report: one process makes it, and this run has 2"
    assert no_report in outputs[0].split("step 1/6")[0]
    assert no_report not in outputs[1]
    assert losses(tmp_path / "run") == pytest.approx(losses(full_run.folder), rel=1e-5)
    assert (tmp_path / "run" / "gates" / "gates.safetensors").is_file()


@pytest.mark.thorough
def test_four_processes_train_like_one(full_run, tmp_path):
    """Two processes have the same rows, and each of them half of the heads."""
    run_processes(TRAIN, *ARGS, "--mesh", "fsdp=2,tensor=2", "--out", str(tmp_path / "run"), count=4)
    assert losses(tmp_path / "run") == pytest.approx(losses(full_run.folder), rel=1e-5)


@pytest.mark.thorough
def test_two_processes_stop_together_if_a_number_is_not_finite(tmp_path):
    args = [*ARGS, "--lr", "1e36", "--mesh", "2", "--out", str(tmp_path / "run")]
    _, outputs = run_processes(TRAIN, *args, exit_code=2)
    lines = [text.splitlines()[-1] for text in outputs]
    assert lines[0] == lines[1]
    assert re.match(r"error: step \d of 6: .* the run is stopped and exports nothing", lines[0])
    assert not (tmp_path / "run" / "gates").exists()


@pytest.mark.thorough
def test_two_processes_save_a_model_that_they_trained(tmp_path):
    """The model is split over both, so that neither could write it alone."""
    method = "tests.train.recipes.whole_model:WholeModel"
    args = ["--method", method, *ARGS[: ARGS.index("--window")], "--sequences", "8", "--report", "none"]
    run_processes(TRAIN, *args, "--mesh", "2", "--out", str(tmp_path / "run"))
    trained = train(parse([*args, "--mesh", "2", "--out", str(tmp_path / "whole")]))
    for actual, expected in zip(
        jax.tree.leaves(load_model(tmp_path / "run" / "parameters" / "model")),
        jax.tree.leaves(trained.model),
        strict=True,
    ):
        np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_the_last_update_is_always_validated_and_saved(tmp_path, capsys):
    args = [*ARGS, "--mesh", "1", "--checkpoint-every", "4", "--validate-every", "5", "--validation", "2"]
    run = train(parse([*args, "--out", str(tmp_path / "run")]))
    before, _ = capsys.readouterr().err.split("step 1/6")
    assert "\na device holds " in before
    _, validations = written(run.folder)
    assert list(validations) == [4, 5]
    assert logged(run.validation) == validations[5]
    assert sorted(file.name for file in (run.folder / "checkpoints").iterdir()) == ["4", "6"]


@pytest.mark.thorough
def test_a_checkpoint_without_a_validation_comes_after_its_metrics(tmp_path, monkeypatch):
    folder, save, saves = tmp_path / "run", Checkpoints.save, {}

    def noted(self, step, *args):
        saves[step] = [line["step"] for line in written(folder)[0]]
        save(self, step, *args)

    monkeypatch.setattr(Checkpoints, "save", noted)
    args = ["--validate-every", "100", "--validation", "1", "--mesh", "1", "--out", str(folder)]
    train(parse([*ARGS, *args]))
    assert saves == {step: list(range(step)) for step in (2, 4, 6)}
