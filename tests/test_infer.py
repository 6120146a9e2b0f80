"""Tests of the programs in infer/ at small sizes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvjax.builtin import builtin_model

pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).parent.parent / "infer"


def run(program: str, *args: str, cwd: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, str(PROGRAMS / program), *args]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


SMALL = ["--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--new-tokens", "4", "--repeats", "1"]


def test_benchmark_writes_a_row_for_each_phase_batch_context_and_path(tmp_path):
    policies = ["wgkv:window=32", "kvpop:max_entries=128", "knorm:ratio=0.25", "quest:ratio=0.25"]
    sizes = ["--context", "512", "1024", "--batch", "2", "--page-size", "8", "--policies", *policies]
    done = run("benchmark.py", *SMALL, *sizes, "--json", "figures.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    groups = [("prefill", 1), ("decode", 2)]
    dense = {"prefill": ["blockwise", "dot_product_attention"], "decode": ["einsum", "dot_product_attention"]}
    by_path = {(row["phase"], row["batch"], row["context"], row["path"]): row for row in rows}
    assert list(by_path) == [
        (phase, batch, context, path)
        for phase, batch in groups
        for context in (512, 1024)
        for path in [*dense[phase], "full", *policies]
    ]
    for (phase, batch, context, path), row in by_path.items():
        rival = by_path[phase, batch, context, row["rival"]]
        assert row["rival"] in (*dense[phase], "full")
        assert rival["ratio"] == rival["roofline"] == 1
        assert row["ratio"] == pytest.approx(rival["seconds"] / row["seconds"])
        assert row["roofline"] * row["fraction"] == pytest.approx(rival["fraction"] * row["ratio"])
        assert (row["bytes"] is None) == (path in dense[phase])
    for phase, batch in groups:
        for context in (512, 1024):
            kept = {path: by_path[phase, batch, context, path]["kv_ratio"] for path in ("full", *policies)}
            assert kept["full"] == kept["quest:ratio=0.25"] == 1
            assert kept["knorm:ratio=0.25"] == pytest.approx(0.25, abs=0.01)
            assert 0.2 < kept["wgkv:window=32"] < 0.4
        constant = [by_path[phase, batch, x, "kvpop:max_entries=128"]["bytes"] for x in (512, 1024)]
        assert constant[0] == constant[1]
    assert done.stdout.count("| ") >= len(rows)


@pytest.mark.thorough
def test_interrupted_benchmark_continues(tmp_path):
    sizes = [
        "--context",
        "128",
        "--policies",
        "knorm:ratio=0.5",
        "--page-size",
        "8",
        "--json",
        "figures.json",
    ]
    assert run("benchmark.py", *SMALL, *sizes, cwd=tmp_path).returncode == 0
    figures = tmp_path / "figures.json"
    found = json.loads(figures.read_text())
    first = [row for row in found["rows"] if row["phase"] == "prefill"]
    figures.write_text(json.dumps(found | {"rows": first}))
    assert run("benchmark.py", *SMALL, *sizes, cwd=tmp_path).returncode == 0
    rows = json.loads(figures.read_text())["rows"]
    assert rows[: len(first)] == first
    assert [row["path"] for row in rows] == [row["path"] for row in found["rows"]]
    other = run("benchmark.py", *SMALL, *sizes, "--width", "64", cwd=tmp_path)
    assert other.returncode != 0
    assert "figures.json: its rows have another config; name another file" in other.stderr
    assert "Traceback" not in other.stderr


def test_throughput_compares_equal_answers(tmp_path):
    pytest.importorskip("torch")
    small = ["--prompts", "3", "--shortest", "5", "--longest", "40", "--new-tokens", "4", "--repeats", "1"]
    options = ["--model", "builtin", "--policies", "knorm:ratio=0.5", "--json", "rows.json"]
    done = run("throughput.py", *options, *small, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["path"] for row in rows] == ["transformers", "full", "knorm:ratio=0.5"]
    assert rows[0]["equal_answers"] == rows[1]["equal_answers"] == 3
    for row in rows:
        assert row["prefill_tokens_per_s"] > 0
        assert row["decode_tokens_per_s"] > 0


@pytest.mark.thorough
def test_eight_bits_compares_weights_with_float32(tmp_path):
    (tmp_path / "text.txt").write_text("def main():\n    return [x for x in range(10)]\n" * 40)
    sizes = ["--pieces", "2", "--length", "64", "--prompt", "16", "--new-tokens", "4", "--repeats", "1"]
    options = ["--model", str(builtin_model("test_model")), "--text", "text.txt", "--json", "rows.json"]
    done = run("eight_bits.py", *options, *sizes, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {row["form"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    exact, small = rows["float32"], rows["int8, float32"]
    assert exact["agreement"] == 1 > rows["fp8, bfloat16"]["agreement"] > 0.8
    assert small["MiB"] < 0.3 * exact["MiB"]
    assert small["perplexity"] != exact["perplexity"]
    assert small["perplexity"] == pytest.approx(exact["perplexity"], rel=0.05)
    assert all(row["ms_per_token"] > 0 for row in rows.values())


@pytest.mark.thorough
def test_needle_prints_and_draws_results(tmp_path):
    few = ["--lengths", "128", "--depths", "2", "--samples", "2", "--out", "picture.png"]
    done = run("needle.py", *few, "--policy", "streaming_llm:window=16", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "128 tokens: " in done.stdout
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_generate_answers_each_question_from_the_text(tmp_path):
    (tmp_path / "text.py").write_text("def first(self):\n    return 1\n" * 8)
    asked = ["--questions", "def second", "class Third", "--max-new-tokens", "4"]
    done = run("generate.py", "--text", "text.py", *asked, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "100% of the text's keys and values kept" in done.stdout
    assert done.stdout.index("def second") < done.stdout.index("class Third")


def test_generate_reports_a_missing_text(tmp_path):
    done = run("generate.py", "--text", "none.txt", "--questions", "what", cwd=tmp_path)
    assert done.returncode != 0
    assert "none.txt" in done.stderr
    assert "Traceback" not in done.stderr
