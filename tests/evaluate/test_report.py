"""Tests of the text and the pictures of an evaluation's report."""

import dataclasses
import json
import shlex
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from kvjax.builtin import builtin_model
from kvjax.cli.launch import parse_command
from kvjax.evaluate import pictures
from kvjax.evaluate.__main__ import main
from kvjax.evaluate.calibrated import wgkv_tau
from kvjax.evaluate.config import EvaluateConfig, parse
from kvjax.evaluate.report import _command, report
from kvjax.evaluate.results import Results
from kvjax.generate import GenerateConfig
from kvjax.models import load_model
from kvjax.policies import make_policy
from tests.evaluate.whole_run import POLICIES, TASKS, lines


@pytest.mark.thorough
def test_the_report_says_what_was_done(evaluated, capsys):
    folder = evaluated[0]
    report = (folder / "report.md").read_text()
    cells = {(c["policy"], c["budget"]): c for c in lines(folder) if c["task"] == "needle"}
    for (policy, budget), cell in cells.items():
        if policy == "snapkv":
            low, high = cell["interval"]
            interval = f"[{100 * low:.0f}–{100 * high:.0f}]"
            assert f"{100 * cell['score']:.1f} {interval} at {cell['footprint']:.2f}" in report
            assert f"| snapkv | {budget:g} | " in report
    for cell in lines(folder):
        if cell["task"] == "text":
            assert f"{100 * cell['score']:.1f} ({cell['perplexity']:.2f}) [" in report
    for said in (
        "**Question-independent**", "## needle, 126 tokens", "## text, 126 tokens",
        "next tokens that are the full cache's", "(and perplexity)", "90% at",
        "48 answers per cell. Brackets have 95% intervals, for", "chunks of 32 tokens",
        "(cpu)", f"jax {jax.__version__}", "command: `python -m kvjax.eval",
    ):  # fmt: skip
        assert said in report, said
    expected = ["pareto", "mean", *(f"{of}/{policy}" for of in ("kept", "needle") for policy in POLICIES)]
    for picture in expected:
        assert (folder / f"{picture}.png").read_bytes().startswith(b"\x89PNG"), picture


@pytest.mark.thorough
def test_a_tau_that_was_searched_can_be_used(evaluated):
    """The report has a command for each, and the command's policy has that τ to the last bit."""
    folder = evaluated[0]
    commands = [line for line in (folder / "report.md").read_text().splitlines() if "kvjax.generate" in line]
    cells = [cell for cell in lines(folder) if cell["policy"] == "wgkv:calibrated"]
    assert len(commands) == len(cells) == 4
    assert len({cell["tau"] for cell in cells}) > 1
    for command, cell in zip(commands, cells, strict=True):
        command, size = command.split("  # ")
        assert size == f"budget {cell['budget']:g}: {cell['kv_ratio']:.3f} of the entries"
        _, _, program, *words = shlex.split(command)
        assert program == "kvjax.generate"
        told = parse_command(GenerateConfig, words)
        assert (told.model, told.dtype) == (str(builtin_model("test_model")), "float32")
        policy = make_policy(told.policy, model=load_model(told.model), gates=told.gates)
        assert wgkv_tau(policy) == cell["tau"]


@pytest.mark.slow
def test_arguments_of_the_policy_are_told_to_the_command(arguments, evaluated):
    config = EvaluateConfig(Path("out"), model="a model", force=True)
    known = Results(parse([*arguments, *TASKS, "--out", str(evaluated[0])])).finished
    cell = dataclasses.replace(
        known["wgkv:calibrated", 0.5, "text", 126], described="wgkv:window=9,calibrated", gates="g", tau=0.25
    )
    assert _command(config, cell).startswith(
        "python -m kvjax.generate --model 'a model' --force --policy wgkv:tau=0.25,window=9 --gates g --prompt-f"
    )


@pytest.mark.thorough
def test_what_reads_contexts_again_is_said_to(arguments, evaluated, tmp_path):
    """The report states it for KVzip, also with own arguments, but not for a method whose name contains KVzip."""
    folder = shutil.copytree(evaluated[0], tmp_path / "run")
    said = "KVzip repeats every context before it compresses it"
    for name, there in {"kvzip:adakv.over=layer": True, "fast_kvzip": False}.items():
        cells = [
            cell | {"policy": name, "described": name} if cell["policy"] == "snapkv" else cell
            for cell in lines(evaluated[0])
        ]
        (folder / "results.jsonl").write_text("".join(json.dumps(cell) + "\n" for cell in cells))
        config = parse([*arguments, *TASKS, "--out", str(folder)])
        report(config, list(Results(config).finished.values()), "command")
        assert (said in (folder / "report.md").read_text()) == there


def test_the_report_shows_all_tasks_side_by_side(arguments, evaluated, tmp_path, monkeypatch):
    """The full cache comes first, then the policies of each budget together, with means of their scores and sizes."""
    drawn = {}
    monkeypatch.setattr(pictures, "draw_means", lambda file, panels: drawn.update({file.name: panels}))
    folder = shutil.copytree(evaluated[0], tmp_path / "run")
    cells = [cell | {"bytes": (1 + 4 * (cell["task"] == "text")) << 20} for cell in lines(folder)]
    (folder / "results.jsonl").write_text("".join(json.dumps(cell) + "\n" for cell in cells))
    main([*arguments, *TASKS, "--out", str(folder)])
    report = (folder / "report.md").read_text()
    _, table = report.split("## All tasks, 126 tokens\n")
    rows = [
        line.strip("| ").split(" | ")
        for line in table.split("\n## ")[0].splitlines()
        if line.startswith("| ")
    ]
    assert rows[0] == ["policy", "budget", "needle", "text", "mean", "capped", "footprint", "MiB"]
    assert [row[:2] for row in rows[1:]] == [
        ["full", "1"],
        *([name, budget] for budget in ("0.25", "0.5") for name in POLICIES[1:]),
    ]
    found = {(c["policy"], c["budget"], c["task"]): c for c in lines(folder)}
    level, means = drawn["mean.png"]["mean of 2 tasks, 126 tokens"]
    assert level == pytest.approx(np.mean([found["full", 1.0, task]["score"] for task in ("needle", "text")]))
    for policy, budget, needle, text, mean, capped, footprint, mib in rows[1:]:
        own = [found[policy, float(budget), task] for task in ("needle", "text")]
        assert needle == f"{100 * own[0]['score']:.1f}"
        assert text == f"{100 * own[1]['score']:.1f} ({own[1]['perplexity']:.2f})"
        assert footprint == f"{(own[0]['footprint'] + own[1]['footprint']) / 2:.2f}"
        mean, _, half = mean.partition(" ± ")
        assert mean == f"{50 * (own[0]['score'] + own[1]['score']):.1f}"
        widths = [cell["interval"][1] - cell["interval"][0] for cell in own]
        assert half == f"{25 * sum(width**2 for width in widths) ** 0.5:.1f}"
        full = [found["full", 1.0, task]["score"] for task in ("needle", "text")]
        assert capped == f"{50 * sum(min(x['score'], most) for x, most in zip(own, full, strict=True)):.1f}"
        if policy != "full":
            kept = (own[0]["kv_ratio"] + own[1]["kv_ratio"]) / 2
            assert (f"{kept:.4f}", capped) in [
                (f"{x:.4f}", f"{100 * score:.1f}") for x, score in means[policy]
            ]
        assert mib == "3.0"


def test_a_mean_is_of_all_tasks_or_not_shown(arguments, evaluated, tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(pictures, "draw_means", lambda file, panels: drawn.update({file.name: panels}))
    config = parse([*arguments, *TASKS, "--out", str(shutil.copytree(evaluated[0], tmp_path / "run"))])
    cells = list(Results(config).finished.values())
    missing = next(
        cell for cell in cells if (cell.policy, cell.budget, cell.task) == ("snapkv", 0.25, "text")
    )
    tables = report(config, [cell for cell in cells if cell is not missing], "…")
    (row,) = (line for line in tables.split("\n## ")[0].splitlines() if line.startswith("| snapkv | 0.25 |"))
    assert "|  |  |" in row
    _, points = drawn["mean.png"]["mean of 2 tasks, 126 tokens"]
    assert (len(points["snapkv"]), len(points["wgkv:calibrated"])) == (1, 2)


def test_nothing_right_has_no_critical_footprint(arguments, evaluated, tmp_path):
    folder = shutil.copytree(evaluated[0], tmp_path / "run")
    cells = [
        cell | {"score": 0.0} if (cell["policy"], cell["task"]) == ("full", "needle") else cell
        for cell in lines(folder)
    ]
    (folder / "results.jsonl").write_text("".join(json.dumps(cell) + "\n" for cell in cells))
    main([*arguments, *TASKS, "--out", str(folder)])
    about, _, needle, text, *_ = (folder / "report.md").read_text().split("\n## ")
    assert "– means that the full cache has no right answer" in about
    assert needle.count("| – |") == len(POLICIES) - 1
    assert "| – |" not in text
