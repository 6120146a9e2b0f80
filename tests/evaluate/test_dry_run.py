"""Tests of `--dry-run`: it refuses wrong configurations in one line, and else prints how much would be measured."""

import json

import pytest

from kvjax.builtin import builtin_model
from kvjax.cli.options import packaged_configs
from kvjax.errors import UserError
from kvjax.evaluate.__main__ import main

PAPERS = sorted(f"papers/{path.stem}" for path in (packaged_configs() / "papers").glob("*.yaml"))
CLAIMS = ["claims/fast_kvzip", "claims/oraclekv", "claims/prulong"]


@pytest.fixture(autouse=True)
def nothing_is_loaded(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a dry run loads nothing")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvjax.hub.fetch", refuse)
    monkeypatch.setattr("kvjax.models.folder.fetch", refuse)
    monkeypatch.setattr("kvjax.models.load_model", refuse)
    monkeypatch.setattr("kvjax.evaluate.sized_tasks.sized_tasks", refuse)


@pytest.mark.parametrize("name", [*PAPERS, *CLAIMS])
def test_packaged_configurations_pass_a_dry_run(name, tmp_path, capsys):
    main(["--config", name, "--out", str(tmp_path / "run"), "--dry-run"])
    shown = capsys.readouterr().out
    assert "weights and data were not read" in shown
    assert not (tmp_path / "run").exists()


def test_a_dry_run_reports_how_much_would_be_measured(capsys):
    """Contexts are read once for the full cache and all budgets of a prompt-end eviction, and once for each budget of
    an eviction by chunks."""
    args = [
        "--policies",
        "full",
        "snapkv",
        "snapkv:when=chunk",
        "--budgets",
        "0.2",
        "0.4",
        "--tasks",
        "vt",
        "cwe",
    ]
    args += ["--model", "Qwen/Qwen3-8B", "--context", "4096", "8192", "--samples", "10", "--mesh", "8"]
    main([*args, "--out", "run", "--dry-run"])
    assert capsys.readouterr().out == (
        "Qwen/Qwen3-8B: 36 layers × 8 KV heads; weights and data were not read\n"
        "3 policies, 5 with their budgets, × 2 tasks × lengths of 4,096, 8,192 tokens: 20 results of 10 answers\n"
        "at most 737,280 tokens to read, each of at most 40 contexts up to 3 times\n"
    )


def test_a_dry_run_names_missing_gates(capsys):
    args = ["--model", "llama-3.1-8b", "--policies", "full", "wgkv", "fast_kvzip", "--tasks", "vt"]
    main([*args, "--gates", "one/gates", "two/gates", "--out", "run", "--dry-run"])
    assert "gates that do not exist yet: one/gates, two/gates; " in (shown := capsys.readouterr().out)
    assert shown.endswith("names are checked for wgkv, fast_kvzip\n")
    assert "3 policies, 7 with their budgets," in shown
    with pytest.raises(UserError, match="--policies wgkv needs --gates of wgkv"):
        main([*args, "--out", "run", "--dry-run"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--policies", "snap_kv"], "unknown method 'snap_kv'; the nearest known: snapkv"),
        (["--policies", "wgkv:taw=1"], "wgkv has no argument 'taw'"),
        (["--policies", "kvzip:ratio=1.5"], "kvzip:ratio=1.5 at 1 of 60000 tokens: .* got 1.5"),
        (["--budgets", "0.00005"], "does not hold"),
        (
            ["--tasks", "longbench_qaspar"],
            "unknown task 'longbench_qaspar'; the nearest known: longbench_qasper",
        ),
        (
            ["--tasks", "aime_2024"],
            "whatever the budget; contests such as aime_2024 need full, streaming_llm",
        ),
        (["--mesh", "1x3"], "tensor axis has size 3, which does not divide the model's kv heads"),
        (
            ["--model", "someone/unknown-9b"],
            "--model someone/unknown-9b: no such folder and no known shape",
        ),
    ],
)
def test_wrong_options_are_refused_in_one_line(args, message, tmp_path):
    with pytest.raises(UserError, match=message):
        main(["--config", "papers/oraclekv-llama-3.1-8b", "--out", "run", "--dry-run", *args])


def test_lengths_with_other_rotary_embeddings_are_refused(tmp_path):
    """LongRoPE has factors for up to the original length, and others for longer sequences."""
    described = json.loads((builtin_model("test_model") / "config.json").read_text())
    factors = {"short_factor": [1.0] * 8, "long_factor": [5.0] * 8, "factor": 4.0}
    described["rope_scaling"] = {"type": "longrope", "original_max_position_embeddings": 1024} | factors
    (tmp_path / "config.json").write_text(json.dumps(described))
    args = ["--model", str(tmp_path), "--policies", "full", "--tasks", "vt", "--out", "run", "--dry-run"]
    main([*args, "--context", "512", "1024"])
    main([*args, "--context", "2048", "4096"])
    with pytest.raises(UserError, match=r"--context 1024 2048: the model's RoPE \(longrope\) .* above 1024"):
        main([*args, "--context", "1024", "2048"])
