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
from kvjax.evaluate.results import Results, read_results
from kvjax.generate import GenerateConfig
from kvjax.models import load_model
from kvjax.policies import make_policy
from tests.evaluate.whole_run import POLICIES, TASKS, lines


@pytest.mark.thorough
def test_the_report_states_scores_and_settings(evaluated):
    folder = evaluated[0]
    report = (folder / "report.md").read_text()
    results = {(c["policy"], c["budget"]): c for c in lines(folder) if c["task"] == "needle"}
    for (policy, budget), result in results.items():
        if policy == "snapkv":
            low, high = result["interval"]
            interval = f"[{100 * low:.0f}–{100 * high:.0f}]"
            assert f"{100 * result['score']:.1f} {interval} at {result['footprint']:.2f}" in report
            assert f"| snapkv | {budget:g} | " in report
    for result in lines(folder):
        if result["task"] == "text":
            assert f"{100 * result['score']:.1f} ({result['perplexity']:.2f}) [" in report
    for text in (
        "**Question-independent**", "## needle, 126 tokens", "## text, 126 tokens",
        "next tokens that are the full cache's", "(and perplexity)", "90% at",
        "48 answers per cell. Brackets have 95% intervals, which", "chunks of 32 tokens",
        "(cpu)", f"jax {jax.__version__}", "command: `python -m kvjax.eval",
    ):  # fmt: skip
        assert text in report, text
    expected = ["pareto", "mean", *(f"{of}/{policy}" for of in ("kept", "needle") for policy in POLICIES)]
    for picture in expected:
        assert (folder / f"{picture}.png").read_bytes().startswith(b"\x89PNG"), picture


@pytest.mark.thorough
def test_the_report_has_a_command_for_each_searched_tau(evaluated):
    """The command's policy has the same τ to the last bit."""
    folder = evaluated[0]
    commands = [line for line in (folder / "report.md").read_text().splitlines() if "kvjax.generate" in line]
    results = [result for result in lines(folder) if result["policy"] == "wgkv:calibrated"]
    assert len(commands) == len(results) == 4
    assert len({result["tau"] for result in results}) > 1
    for command, result in zip(commands, results, strict=True):
        command, size = command.split("  # ")
        assert size == f"budget {result['budget']:g}: {result['kv_ratio']:.3f} of the entries"
        _, _, program, *words = shlex.split(command)
        assert program == "kvjax.generate"
        options = parse_command(GenerateConfig, words)
        assert (options.model, options.dtype) == (str(builtin_model("test_model")), "float32")
        policy = make_policy(options.policy, model=load_model(options.model), gates=options.gates)
        assert wgkv_tau(policy) == result["tau"]


@pytest.mark.slow
def test_the_command_has_the_arguments_of_the_policy(arguments, evaluated):
    config = EvaluateConfig(Path("out"), model="a model", force=True)
    known = Results(parse([*arguments, *TASKS, "--out", str(evaluated[0])])).finished
    result = dataclasses.replace(
        known["wgkv:calibrated", 0.5, "text", 126], described="wgkv:window=9,calibrated", gates="g", tau=0.25
    )
    assert _command(config, result).startswith(
        "python -m kvjax.generate --model 'a model' --force --policy wgkv:tau=0.25,window=9 --gates g --prompt-f"
    )


@pytest.mark.thorough
def test_the_report_explains_kvzips_footprint(arguments, evaluated, tmp_path):
    """The explanation also appears for KVzip with arguments, but not for Fast KVzip."""
    folder = shutil.copytree(evaluated[0], tmp_path / "run")
    explanation = "KVzip repeats every context before it compresses it"
    for name, expected in {"kvzip:adakv.over=layer": True, "fast_kvzip": False}.items():
        results = [
            result | {"policy": name, "described": name} if result["policy"] == "snapkv" else result
            for result in lines(evaluated[0])
        ]
        (folder / "results.jsonl").write_text("".join(json.dumps(result) + "\n" for result in results))
        config = parse([*arguments, *TASKS, "--out", str(folder)])
        report(config, list(Results(config).finished.values()), "command")
        assert (explanation in (folder / "report.md").read_text()) == expected


@pytest.mark.slow
def test_the_report_shows_all_tasks_side_by_side(arguments, evaluated, tmp_path, monkeypatch):
    """The full cache comes first, then the policies of each budget together, with means of their scores and sizes."""
    drawn = {}
    monkeypatch.setattr(pictures, "draw_means", lambda file, panels: drawn.update({file.name: panels}))
    folder = shutil.copytree(evaluated[0], tmp_path / "run")
    results = [result | {"bytes": (1 + 4 * (result["task"] == "text")) << 20} for result in lines(folder)]
    (folder / "results.jsonl").write_text("".join(json.dumps(result) + "\n" for result in results))
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
        both_tasks = [found[policy, float(budget), task] for task in ("needle", "text")]
        assert needle == f"{100 * both_tasks[0]['score']:.1f}"
        assert text == f"{100 * both_tasks[1]['score']:.1f} ({both_tasks[1]['perplexity']:.2f})"
        assert footprint == f"{(both_tasks[0]['footprint'] + both_tasks[1]['footprint']) / 2:.2f}"
        mean, _, half = mean.partition(" ± ")
        assert mean == f"{50 * (both_tasks[0]['score'] + both_tasks[1]['score']):.1f}"
        widths = [result["interval"][1] - result["interval"][0] for result in both_tasks]
        assert half == f"{25 * sum(width**2 for width in widths) ** 0.5:.1f}"
        full = [found["full", 1.0, task]["score"] for task in ("needle", "text")]
        assert (
            capped
            == f"{50 * sum(min(x['score'], most) for x, most in zip(both_tasks, full, strict=True)):.1f}"
        )
        if policy != "full":
            kept = (both_tasks[0]["kv_ratio"] + both_tasks[1]["kv_ratio"]) / 2
            assert (f"{kept:.4f}", capped) in [
                (f"{x:.4f}", f"{100 * score:.1f}") for x, score in means[policy]
            ]
        assert mib == "3.0"


@pytest.mark.slow
def test_a_mean_is_shown_only_if_all_tasks_were_measured(arguments, evaluated, tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(pictures, "draw_means", lambda file, panels: drawn.update({file.name: panels}))
    config = parse([*arguments, *TASKS, "--out", str(shutil.copytree(evaluated[0], tmp_path / "run"))])
    results = list(Results(config).finished.values())
    missing = next(
        result
        for result in results
        if (result.policy, result.budget, result.task) == ("snapkv", 0.25, "text")
    )
    tables = report(config, [result for result in results if result is not missing], "…")
    (row,) = (line for line in tables.split("\n## ")[0].splitlines() if line.startswith("| snapkv | 0.25 |"))
    assert "|  |  |" in row
    _, points = drawn["mean.png"]["mean of 2 tasks, 126 tokens"]
    assert (len(points["snapkv"]), len(points["wgkv:calibrated"])) == (1, 2)


@pytest.mark.slow
def test_a_full_cache_without_right_answers_has_no_critical_footprint(arguments, evaluated, tmp_path):
    folder = shutil.copytree(evaluated[0], tmp_path / "run")
    results = [
        result | {"score": 0.0} if (result["policy"], result["task"]) == ("full", "needle") else result
        for result in lines(folder)
    ]
    (folder / "results.jsonl").write_text("".join(json.dumps(result) + "\n" for result in results))
    main([*arguments, *TASKS, "--out", str(folder)])
    about, _, needle, text, *_ = (folder / "report.md").read_text().split("\n## ")
    assert "– means that the full cache has no right answer" in about
    assert needle.count("| – |") == len(POLICIES) - 1
    assert "| – |" not in text


def test_methods_and_labels_are_told_apart(tmp_path, monkeypatch):
    """Arguments may have the names of methods, and labels may be long or differ only by a slash."""
    files = []
    monkeypatch.setattr(pictures, "draw_kv_ratios", lambda file, *_: files.append(file.name))
    monkeypatch.setattr(pictures, "draw_tradeoff", lambda *_: None)
    folder = Path(__file__).parents[2] / "docs" / "evaluations" / "qwen2.5-coder-0.5b"
    result = next(iter(read_results(folder / "results.jsonl").values()))
    policies = {
        "a/b": "oraclekv:guidance=Answer questions about it.",
        "a_b": "wgkv:gates=runs/calibrated/gates",
        "c" * 300: "wgkv:calibrated",
    }
    results = [
        dataclasses.replace(result, policy=label, described=policy, gates="g", tau=0.5)
        for label, policy in policies.items()
    ]
    tables = report(EvaluateConfig(tmp_path), results, "command")
    assert "Quest frees no memory" not in (tmp_path / "report.md").read_text()
    assert (tables.count("0.5, searched"), tables.count("kvjax.generate")) == (1, 1)
    assert len(set(files)) == 3
    assert max(len(name) for name in files) < 255
