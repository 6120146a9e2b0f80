"""Tests of the options of an evaluation, and of defaults that follow from other options."""

import re
import shlex

import pytest

from kvjax.cli.options import packaged_configs
from kvjax.errors import UserError
from kvjax.evaluate.config import default_chunk, default_observed, parse
from kvjax.evaluate.sizing import check_policies
from kvjax.tasks.registry import TASKS
from kvjax.train.config import parse as parse_training

PACKAGED = sorted(f"{path.parent.name}/{path.stem}" for path in packaged_configs().glob("*/*.yaml"))


def test_default_chunk_and_observed():
    assert (default_chunk(1024), default_chunk(10**6), default_chunk(3)) == (256, 32768, 1)
    assert (default_observed(256), default_observed(32768), default_observed(8)) == (16, 64, 1)


def test_turns_are_checked(tmp_path):
    assert parse(["--out", str(tmp_path)]).turns == "each"
    for options, message in (
        (["--turns", "all"], "--turns must be one of each, golden, own, got all"),
        (
            ["--turns", "own", "--question-aware"],
            "--turns own depends on the model's answers, so .* use each or golden",
        ),
    ):
        with pytest.raises(UserError, match=message):
            parse(["--out", str(tmp_path), *options])
    assert parse(["--out", str(tmp_path), "--turns", "golden", "--question-aware"]).question_aware


def test_the_command_line_overrides_a_configuration_file(tmp_path):
    file = tmp_path / "compared.yaml"
    file.write_text("policies: [full, 'snapkv:pool=7,group=max']\nbudgets: [0.3]\ncontext: [128]\n")
    config = parse(["--config", str(file), "--out", str(tmp_path), "--context", "256"])
    assert config.policies == ("full", "snapkv:pool=7,group=max")
    assert config.budgets == (0.3,)
    assert config.context == (256,)
    file.write_text("policy: [full]\n")
    with pytest.raises(UserError, match="unknown key 'policy'; the nearest known: policies"):
        parse(["--config", str(file), "--out", str(tmp_path)])


@pytest.mark.parametrize("name", PACKAGED)
def test_packaged_configurations_have_known_policies_and_tasks(name, tmp_path):
    config = parse(["--config", name, "--out", str(tmp_path)])
    check_policies(config)
    assert config.model == "builtin" or "/" in config.model
    assert set(config.tasks) <= set(TASKS)


@pytest.mark.parametrize("name", PACKAGED)
def test_commands_in_the_comments_of_packaged_configurations_parse(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    comments = (packaged_configs() / f"{name}.yaml").read_text()
    # a claim's $S is a seed; a paper's variables are a sparsity ($S), a λ ($L) and a number of entries ($B)
    comments = re.sub(r"\$[SL]\b", "0" if name.startswith("claims") else "0.5", comments).replace("$B", "512")
    commands = re.findall(r"python -m kvjax\.(\w+) (.*)", comments)
    evaluated = 0
    for program, rest in commands:
        if program == "train":
            parse_training(shlex.split(rest))
        else:
            check_policies(parse(shlex.split(rest)))
            evaluated += f"--config {name} " in rest
    assert evaluated
