"""The programs in infer/, run as a person runs them, at small sizes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvjax.builtin import builtin_model

PROGRAMS = Path(__file__).parent.parent / "infer"


def run(program: str, *args: str, cwd: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, str(PROGRAMS / program), *args]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


def test_benchmark_writes_a_row_for_each_phase(tmp_path):
    small = ["--layers", "2", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--new-tokens", "4"]
    sizes = ["--context", "512", "--window", "32", "--page-size", "8", "--repeats", "2"]
    policies = ["knorm", "head_pattern"]
    more = ["--policies", *policies, "--json", "figures.json"]
    done = run("benchmark.py", *small, *sizes, *more, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "figures.json").read_text())
    rows = [(row["policy"], row["phase"]) for row in written["rows"]]
    timed = ["random + gates", *policies]
    assert rows == [(name, phase) for name in timed for phase in ("prefill", "decode")]
    assert [row["policy"] for row in written["rows"] if "eviction_s" in row] == ["knorm"]
    for row in written["rows"]:
        assert row["full_s"] > 0
        assert row["policy_s"] > 0
        assert row["ratio"] == pytest.approx(row["full_s"] / row["policy_s"])
        assert row["rival"] in ("blockwise", "dot_product_attention", "full policy")
        assert 0.25 <= row["kv_ratio"] < 0.35
        assert row["bytes"] <= 0.5 * row["full_bytes"]
    assert done.stdout.count("75% sparse") == len(rows)


@pytest.mark.thorough
def test_benchmark_times_a_constant_cache_by_position(tmp_path):
    small = ["--layers", "1", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--new-tokens", "4"]
    more = ["--positions", "600", "1200", "--repeats", "1", "--json", "figures.json"]
    done = run("benchmark.py", *small, *more, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, last = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert (first["position"], last["position"]) == (600, 1200)
    assert first["bytes"] == last["bytes"] < first["full_bytes"] < 0.6 * last["full_bytes"]
    assert first["beside_first"] == 1
    assert last["beside_first"] == pytest.approx(last["policy_s"] / first["policy_s"])
    assert "decode after    1200 tokens: full " in done.stdout


@pytest.mark.thorough
def test_needle_draws_what_it_prints(tmp_path):
    few = ["--lengths", "128", "--depths", "2", "--samples", "2", "--out", "picture.png"]
    done = run("needle.py", *few, "--policy", "streaming_llm", "--window", "16", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "128 tokens: " in done.stdout
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough
def test_gating_counts_what_gates_add_at_a_large_model(tmp_path):
    """Llama-3.1-8B and 4,096 entries a kv head, by hand; and each path is timed."""
    few = ["--entries", "133", "--prompts", "1", "--new-tokens", "129", "--repeats", "1"]
    model = ["--model", str(builtin_model("test_model")), "--json", "figures.json"]
    done = run("gating.py", *model, *few, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "figures.json").read_text())
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    entries = 4096 * 128
    step = {
        "flops": 2 * (32 * (layer + 2 * 32 * entries) + 4096 * 128256),
        "bytes": 2 * (32 * (layer + 2 * 8 * entries) + 4096 * 128256),
    }
    # 16 numbers of each of 32 queries and 8 keys, once a token and read once every 128
    gate = {"flops": 2 * 32 * 4096 * 640, "bytes": 2 * 32 * 4096 * 640 / 128}
    assert written["counted"] == {
        f"{of}_{what}": own for of, two in (("step", step), ("gate", gate)) for what, own in two.items()
    }
    assert gate["flops"] / step["flops"] <= 0.01
    assert "gates add 0.98% of a step's operations and 0.008% of its bytes" in done.stdout
    assert list(written["ms"]) == ["constant scores", "gates, 128 at once", "gates, one by one"]
    assert all(0 < own["least"] <= own["median"] for own in written["ms"].values())


@pytest.mark.thorough
def test_gates_make_a_cache_overflow_less_often(tmp_path):
    sizes = ["--prompts", "2", "--prompt-tokens", "96", "--new-tokens", "64", "--entries", "64"]
    done = run("overflow.py", *sizes, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    alone, gated = done.stdout.splitlines()
    evictions = [float(line.split(": ")[1].split()[0]) for line in (alone, gated)]
    assert alone.startswith("snapkv: ")
    assert gated.startswith("wgkv+snapkv: ")
    assert evictions[0] >= 8 > evictions[1]


def test_generate_answers_each_question_from_the_text(tmp_path):
    (tmp_path / "text.py").write_text("def first(self):\n    return 1\n" * 8)
    asked = ["--questions", "def second", "class Third", "--max-new-tokens", "4"]
    done = run("generate.py", "--text", "text.py", *asked, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "100% of their keys and values kept" in done.stdout
    assert done.stdout.index("def second") < done.stdout.index("class Third")


def test_generate_says_when_there_is_no_text(tmp_path):
    done = run("generate.py", "--text", "none.txt", "--questions", "what", cwd=tmp_path)
    assert done.returncode != 0
    assert "none.txt" in done.stderr
    assert "Traceback" not in done.stderr


def test_throughput_is_that_of_equal_answers(tmp_path):
    pytest.importorskip("torch")
    small = ["--prompts", "3", "--shortest", "5", "--longest", "40", "--new-tokens", "5", "--repeats", "1"]
    done = run("throughput.py", *small, "--policies", "full", "--json", "rows.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rival, own = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert (rival["path"], own["path"]) == ("transformers", "full")
    assert rival["equal_answers"] == own["equal_answers"] == 3
    assert min(rival["prefill_tokens_per_s"], own["prefill_tokens_per_s"]) > 0
    assert all(row["decode_tokens_per_s"] is None or row["decode_tokens_per_s"] > 0 for row in (rival, own))


@pytest.mark.thorough
def test_prefill_says_what_kvzips_second_pass_costs(tmp_path):
    small = ["--tokens", "256", "--chunk", "64", "--prompts", "1", "--repeats", "1"]
    done = run("prefill.py", *small, "--json", "rows.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert list(rows) == ["full", "kvzip", "fast_kvzip"]
    assert rows["full"]["peak"] == rows["full"]["kept"] == 1.0
    # what is read again stands beside the whole prompt; chunks never do
    assert rows["kvzip"]["peak"] > 2.0
    assert rows["fast_kvzip"]["peak"] < 0.7
    for name in ("kvzip", "fast_kvzip"):
        assert rows[name]["kept"] == pytest.approx(0.3, abs=0.02)


@pytest.mark.thorough
def test_long_answers_leave_what_gates_keep(tmp_path):
    small = ["--prompt-tokens", "256", "--new-tokens", "200", "--entries", "160", "--samples", "64"]
    named = ["--policies", "full", "fast_kvzip", "streaming_llm", "--json", "rows.json"]
    done = run("long_answers.py", *small, *named, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert rows["fast_kvzip"]["most"] <= 160 + 128 + 1
    assert rows["full"]["right"] >= rows["fast_kvzip"]["right"] > 0.8
    # three fifths of the prompt are behind its window
    assert 0.2 < rows["streaming_llm"]["right"] < 0.7


@pytest.mark.thorough
def test_shared_context_holds_a_context_once(tmp_path):
    small = ["--tokens", "600", "--questions", "8", "--new-tokens", "4", "--repeats", "1"]
    done = run("shared_context.py", *small, "--json", "rows.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {(x["policy"], x["way"]): x for x in json.loads((tmp_path / "rows.json").read_text())}
    assert len(rows) == 2 * 5
    for policy in ("full", "snapkv"):
        alone = rows[policy, "one by one"]["bytes"]
        assert rows[policy, "shared"]["bytes"] < rows[policy, "copies"]["bytes"] / 2
        assert rows[policy, "copies"]["bytes"] >= 4 * alone
    assert rows["snapkv", "one by one"]["bytes"] < 0.5 * rows["full", "one by one"]["bytes"]
    assert done.stdout.count("questions/s") == 6
    assert done.stdout.count("ms to a token") == 4
