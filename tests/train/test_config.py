"""Test the options of a run: packaged values, one-line errors before anything starts, and resumed runs."""

import dataclasses

import pytest

from kvjax.cli.launch import MeshShape, run_command
from kvjax.cli.options import packaged_configs
from kvjax.errors import UserError
from kvjax.train import config as module
from kvjax.train import hard_concrete
from kvjax.train.config import SAVED, parse, prepare_folder
from kvjax.train.data import draw_step_lengths
from kvjax.train.loop import plan
from kvjax.train.recipes import duo_attention, find_recipe, prulong
from kvjax.train.run import check, train

PACKAGED = sorted(path.stem for path in packaged_configs().glob("*.yaml"))


@pytest.fixture(autouse=True)
def isolated_runs_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "RUNS", tmp_path / "runs")


def refusal(capsys, args):
    """Return the line that the command prints for `args`, which must be all it prints."""
    with pytest.raises(SystemExit) as leaving:
        run_command(lambda: train(parse(args)))
    assert leaving.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    return shown.err


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--mesh", "0"], ["mesh '0'", "at least 1"]),
        (["--lambda", "-0.1"], ["--lambda must be at least 0, got -0.1"]),
        (["--lambda", "nan"], ["lambda", "a number"]),
        (["--window", "0"], ["--window must be at least 1, got 0"]),
        (["--tau", "2"], ["--tau must be between 0 and 1, got 2"]),
        (["--sequences", "0"], ["--sequences"]),
        (["--validation", "0"], ["--validation must be at least 1, got 0"]),
        (["--validate-every", "0"], ["--validate-every"]),
        (["--batch", "0"], ["--batch"]),
        (["--seed", "-1"], ["--seed must be from 0 to 2147483647, got -1"]),
        (["--seed", "2147483648"], ["--seed must be from 0 to 2147483647, got 2147483648"]),
        (["--expand", "0"], ["--expand must be a finite number above 0, got 0"]),
        (["--expand", "inf"], ["--expand must be a number, got inf"]),
        (["--expand", "0.01"], ["--expand 0.01 makes gates 0.32 wide for the model's head_dim of 32"]),
        (["--expand", "1e308"], ["--expand 1e+308 makes gates inf wide"]),
        (["--lengths", "16", "--window", "16"], ["--lengths 16 is not above --window 16"]),
        (["--lengths", "512", "256"], ["--lengths", "rising", "[512, 256]"]),
        (["--lengths", "64", "128", "--shares", "1"], ["--shares", "2 lengths"]),
        (["--lengths", "32", "--shares", "1"], ["--lengths 32", "at least 64"]),
        (["--dtype", "int8"], ["--dtype", "bfloat16"]),
        (["--weights", "int4"], ["weights must be int8 or fp8, got 'int4'"]),
        (["--method", "kvpop", "--weights", "int8"], ["kvpop trains the model itself", "8 bits (int8)"]),
        (["--config", "no-such"], ["--config no-such", "builtin"]),
        (["--model", "no-such-folder"], ["no-such-folder"]),
        (["--mesh", "1x3"], ["tensor axis has size 3", "kv heads (4)"]),
        (["--mesh", "32"], ["--mesh 32 needs 32 devices", "has 8"]),
        (["--sequencez", "3"], ["--sequencez", "--sequences"]),
        (["--resume"], ["--resume", "no run"]),
        (["--out", "long" * 100], ["--out longlong", "cannot be written: File name too long"]),
        (["--out", "{file}"], ["--out", "is a file, expected a folder"]),
        (
            ["--report", "none", "--tasks", "vt", "cwe"],
            ["--tasks vt cwe are for the report", "--report none"],
        ),
    ],
)
def test_wrong_options_are_errors_of_one_line(args, parts, capsys):
    line = refusal(capsys, [__file__ if arg == "{file}" else arg for arg in args])
    assert all(part in line for part in parts), line
    assert not module.RUNS.exists()


def test_a_misspelt_key_is_refused_with_the_nearest(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text("windw: 8\n")
    line = refusal(capsys, ["--config", str(file)])
    assert all(part in line for part in (str(file), "'windw'", "nearest known: window")), line


def test_unusable_files_are_named(tmp_path, capsys):
    empty, folder, file = tmp_path / "empty.txt", tmp_path / "empty-folder", tmp_path / "taken"
    empty.write_text(" \n")
    folder.mkdir()
    file.write_text("a file where a folder should be")
    assert "there is no text in it" in refusal(capsys, ["--data", str(empty)])
    assert "config.json" in refusal(capsys, ["--model", str(folder), "--window", "8"])
    assert f"--out {file / 'run'} cannot be written" in refusal(capsys, ["--out", str(file / "run")])
    (folder / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_text(
        (packaged_configs().parent / "kvjax/builtin/model/config.json").read_text()
    )
    assert "--data builtin" in refusal(capsys, ["--model", str(folder)])
    assert "--tasks are for the report of another model than the built-in" in refusal(
        capsys, ["--tasks", "vt"]
    )


@pytest.mark.parametrize("name", PACKAGED)
def test_every_packaged_config_parses(name):
    config = parse(["--config", name])
    assert config.model == "builtin" or "/" in config.model
    assert sum(config.shares) > 0
    assert config.rows == config.batch


PUBLISHED = {
    "prulong": {
        "lengths": (131072,), "sequences": 8000, "batch": 8, "steps": 1000, "data_kind": "natural",
        "sparsity": 0.7, "sink": 128, "window": 1024, "block": 128, "start": 4.0, "l0": "sampled",
        "frozen_model": True, "lr": 1.0, "multiplier_lr": 1.0, "model_lr": 1e-5, "weight_decay": 0.1, "clip": 1.0,
    },
    "duo_attention": {
        "lengths": (8000, 16000, 24000, 32000), "shares": (1.0, 1.0, 1.0, 1.0), "sequences": 2000, "batch": 1,
        "steps": 2000, "data_kind": "passkeys", "passkeys": 10, "words": 32, "sparsity": 0.5,
        "sink": 128, "window": 256, "block": 128, "regularized": 0.05, "lr": 0.02,
    },
}  # fmt: skip
"""Values of the papers and their code: arXiv:2506.17121, Sec. 4, App. B and C; arXiv:2410.10819."""


@pytest.mark.parametrize("method", PUBLISHED)
def test_head_masks_are_trained_with_the_published_numbers(method):
    """They are the defaults, and those of the config for the papers' model."""
    published = parse(["--config", f"{method}-llama-3.1-8b"])
    assert (published.model, published.dtype) == ("meta-llama/Llama-3.1-8B-Instruct", "bfloat16")
    for config in (published, find_recipe(method)()):
        assert config.method == method
        assert {name: getattr(config, name) for name in PUBLISHED[method]} == PUBLISHED[method]
    assert (prulong.RAMP, prulong.FLOOR, prulong.SPREAD) == (0.8, 0.01, 0.01)
    assert (duo_attention.RAMP, duo_attention.FLOOR) == (5, 0.1)
    assert (hard_concrete.TEMPERATURE, hard_concrete.LOW, hard_concrete.HIGH) == (2 / 3, -0.1, 1.1)


def test_the_default_is_the_built_in_config_and_another_model_starts_from_the_paper():
    assert parse([]).window == 16
    config = parse(["--model", "some/folder", "--data", "some/data"])
    assert (config.window, config.lambda_, config.tau, config.lr) == (256, 0.04, 0.1, 1e-3)
    assert (config.sequences, config.batch, config.steps) == (7500, 1, 7500)
    assert parse(["--config", "builtin", "--window", "9"]).window == 9


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], ((4096, 8192, 16384, 32768), (4000, 2000, 1000, 500), 256)),
        (["--lengths", "512", "1024", "2048"], ((512, 1024, 2048), (4, 2, 1), 256)),
        (["--lengths", "256"], ((256,), (1,), 64)),
        (["--lengths=300"], ((300,), (1,), 256)),
        (["--lengths", "256", "512", "--shares", "1", "3", "--window", "8"], ((256, 512), (1, 3), 8)),
        (["--config", "llama-3.1-8b", "--lengths", "512", "768"], ((512, 768), (1.5, 1), 256)),
        (["--config", "{file}"], ((512, 2048), (4, 1), 256)),
    ],
)
def test_lengths_alone_determine_shares_and_window(args, expected, tmp_path):
    (tmp_path / "mine.yaml").write_text("lengths: [512, 2048]\n")
    args = [part.format(file=tmp_path / "mine.yaml") for part in args]
    config = parse(["--model", "some/folder", "--data", "some/data", *args])
    assert (config.lengths, config.shares, config.window) == expected
    if args == ["--lengths", "256"]:
        assert parse(args).shares == (1,), "of the built-in model's two"


@pytest.mark.parametrize("mesh", ["1", "8", "3", "4x2", "tensor=8", "data=4,fsdp=8"])
def test_the_number_of_tokens_does_not_depend_on_the_mesh(mesh):
    config = parse(["--config", "llama-3.1-8b", "--mesh", mesh])
    lengths = draw_step_lengths(config.steps, config.lengths, config.shares, config.seed)
    tokens = config.rows * int(lengths.sum())
    assert tokens == pytest.approx(65_536_000, rel=0.01)
    assert f"{tokens:,} tokens in all: {config.steps} updates of {config.rows}" in plan(config, 0, tokens, 1)
    if config.rows == 1:
        assert (config.steps, tokens) == (7500, 65_536_000)


def test_a_run_is_numbered_saved_and_resumed(tmp_path):
    first = parse(["--mesh", "4x2", "--lambda", "0.7"])
    assert first.out == tmp_path / "runs/train-1"
    prepare_folder(first)
    assert parse([]).out == tmp_path / "runs/train-2"
    resumed = parse(["--resume", "--mesh", "2"])
    assert resumed == dataclasses.replace(first, resume=True, mesh=MeshShape(1, 2, 1), config=None, batch=8)
    with pytest.raises(UserError, match=r"--resume goes on with the run's own --lambda 0.7, got 0.5"):
        parse(["--resume", "--lambda", "0.5"])
    with pytest.raises(UserError, match=r"--resume goes on with the run's own --method wgkv, got prulong"):
        parse(["--resume", "--method", "prulong"])
    with pytest.raises(
        UserError, match=r"the run's own 8 sequences an update, got 9, by --batch or rounded up to"
    ):
        parse(["--resume", "--mesh", "3"])
    with pytest.raises(UserError, match="started just now"):
        prepare_folder(first)
    with pytest.raises(UserError, match="already holds a run: pass --resume"):
        parse(["--out", str(first.out)])
    with pytest.raises(UserError, match="other holds no run"):
        parse(["--resume", "--out", str(tmp_path / "other")])
    assert (first.out / SAVED).is_file()


def test_resume_and_config_exclude_each_other(tmp_path):
    with pytest.raises(UserError, match="--config llama-3.1-8b: --resume goes on with the run's own options"):
        parse(["--resume", "--config", "llama-3.1-8b"])
    (tmp_path / "resume.yaml").write_text("resume: true\n")
    with pytest.raises(UserError, match="resume belongs on the command line"):
        parse(["--config", str(tmp_path / "resume.yaml")])


def test_a_run_saves_its_rounded_batch(tmp_path):
    prepare_folder(parse(["--mesh", "8", "--batch", "3", "--out", str(tmp_path / "run")]))
    resumed = parse(["--resume", "--mesh", "1", "--out", str(tmp_path / "run")])
    assert (resumed.batch, resumed.rows) == (8, 8)


def test_a_folder_with_exports_is_refused(tmp_path):
    (tmp_path / "mine" / "gates").mkdir(parents=True)
    with pytest.raises(
        UserError, match="--out .*mine has gates in it, which the run would replace: name another"
    ):
        parse(["--out", str(tmp_path / "mine")])
    with pytest.raises(UserError, match="--out is empty, expected a folder"):
        parse(["--out", ""])


def test_a_tilde_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").write_text("out: ~/a run\n")
    run = parse(["--config", str(tmp_path / "mine.yaml")])
    prepare_folder(run)
    assert run.out == parse(["--resume", "--out=~/a run"]).out == tmp_path / "a run"


def test_lengths_beyond_the_models_limit_give_a_warning():
    with pytest.warns(
        UserWarning,
        match=r"^--lengths 5000: more tokens than the 4,096 that the model declares or was trained for$",
    ):
        check(parse(["--lengths", "5000"]))


def test_the_error_for_a_file_of_another_method_names_the_method():
    method = "tests.train.recipes.whole_model:WholeModel"
    with pytest.raises(UserError, match=f"unknown key 'expand'.*The file is for --method wgkv, not {method}"):
        parse(["--method", method, "--config", "llama-3.1-8b"])
