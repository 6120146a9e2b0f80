"""Tests that the command refuses wrong options, each in one line, before anything runs."""

import json
import subprocess
import sys

import numpy as np
import pytest

from kvjax.builtin import builtin_model
from kvjax.errors import UserError
from kvjax.evaluate.__main__ import main
from kvjax.models import load_model
from kvjax.policies.admission.pattern_folder import write_pattern
from kvjax.policies.admission.wgkv import save_gates
from tests.evaluate.inputs import SMALL, fact
from tests.tiny_models import tiny_gates


@pytest.fixture(scope="module")
def ruler_data(tmp_path_factory):
    """Return a folder of RULER's own data, with rows that cannot be cut, that are too long, and that lack a field."""
    folder = tmp_path_factory.mktemp("ruler")
    rows = {
        "vt": {"input": "no question " * 30, "outputs": ["1"]},
        "cwe": {"input": "word " * 300 + "\nQuestion: which?", "outputs": ["word"]},
        "fwe": {"input": "a\nQuestion: which?"},
    }
    for name, row in rows.items():
        (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    return folder


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--policies", "full", "snap_kv"],
            r"--policies snap_kv: unknown method 'snap_kv'; the nearest known: snapkv",
        ),
        (["--policies", "full", "full"], "--policies names full twice"),
        (["--policies", "wgkv"], "--policies wgkv needs --gates of wgkv, a folder that training exported"),
        (["--policies", "wgkv", "--gates", "nowhere"], "nowhere holds no gates: it has no gates.safetensors"),
        (["--policies", "wgkv", "--gates", "builtin"], "these gates are for .* the model has"),
        (
            ["--policies", "head_pattern:gates=nowhere"],
            "nowhere is no head pattern: it has no full_attention_heads.tsv",
        ),
        (
            ["--policies", "head_pattern:gates={pattern}"],
            "head_pattern: pattern made for 3 layers × 4 kv heads, the model has 2 × 4",
        ),
        (
            ["--policies", "streaming_llm", "--budgets", "0.02"],
            "streaming_llm at 0.02 of 126 tokens: a budget of 2.5 entries of each kv head does not hold 4 sinks",
        ),
        (
            ["--policies", "streaming_llm", "--budgets", "0.033", "--tasks", "needle"],
            r"needle at --context 126: streaming_llm at 0.033 of \d+ tokens: a budget of 3\.\d entries",
        ),
        (
            ["--policies", "snapkv:when=chunk,pyramidkv", "--observed", "32"],
            "snapkv:when=chunk,pyramidkv at 0.1 of .* more than 32 tokens, got 32",
        ),
        (
            ["--policies", "snapkv:when=chunk"],
            "the budget of 3 of a chunk's 32 entries per kv head is below the 4 that always stay",
        ),
        (["--budgets", "0.5", "1.5"], "--budgets are shares above 0 and at most 1, got 1.5"),
        (["--budgets", "0"], "--budgets are shares above 0 and at most 1, got 0"),
        (["--tasks", "needles"], "--tasks: unknown task 'needles'; the nearest known: needle"),
        (["--tasks", "copy", "--context", "32"], "17 tokens are too few to hide 48 in"),
        (["--tasks", "vt", "--context", "200"], "vt: 200 tokens are too few, the shortest prompt"),
        (
            ["--tasks", "documents"],
            "a task needs --data documents=PATH, a text file or a folder",
        ),
        (["--tasks", "qa_1"], "qa_1 needs the JSON file of SQuAD, as --data squad=FILE"),
        (["--samples", "0"], "--samples must be at least 1, got 0"),
        (["--chunk", "0"], "--chunk must be at least 1, got 0"),
        (["--order-contexts", "0"], "--order-contexts must be at least 1, got 0"),
        (["--dtype", "int8"], "--dtype must be one of float32, bfloat16, float16, got int8"),
        (["--seed", "-1"], "--seed must be from 0 to 2147483647, got -1"),
        (["--capacity", "abc"], r"capacity 'abc': expected entries per kv head \(4096\), bytes"),
        (["--page-size", "128"], "--page-size must be at most the shortest --context, 126, got 128"),
    ],
)
def test_invalid_options_are_refused_before_weights_are_read(args, message, tmp_path, monkeypatch):
    monkeypatch.setattr("kvjax.models.load_model", None)
    policies = [] if "--policies" in args else ["--policies", "full"]
    tasks = [] if "--tasks" in args else ["--tasks", "needle"]
    write_pattern(tmp_path / "pattern", np.eye(3, 4) / 2, 4, 16)
    args = [arg.format(pattern=tmp_path / "pattern") for arg in args]
    with pytest.raises(UserError, match=message):
        main([*SMALL, *policies, *tasks, *args, "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("vt", "--tasks vt: its samples hold context and question in one, .* use --question-aware"),
        (
            "cwe",
            r"--data ruler .*: sample 0 of cwe takes \d+ tokens with its answer, more than --context 200",
        ),
        ("fwe", "fwe.jsonl: line 1 has no field `outputs`, it has input"),
        ("niah_single_1", "there are no samples of niah_single_1, expected niah_single_1.jsonl, "),
    ],
)
def test_invalid_ruler_data_is_refused(task, message, ruler_data, tmp_path):
    args = ["--policies", "full", "--tasks", task, "--context", "200", "--data", f"ruler={ruler_data}"]
    args += ["--samples", "1"]
    with pytest.raises(UserError, match=message):
        main([*SMALL, *args, "--out", str(tmp_path / "run")])


@pytest.mark.parametrize(
    ("policies", "samples", "message"),
    [
        (["full"], "9", "there are 8 samples of qa_1, needed 9 to compare; give fewer --samples"),
        (
            ["head_pattern:calibrated"],
            "7",
            "needed 7 to compare and 2 more to calibrate on, about other texts; give fewer --samples",
        ),
        (["full", "streaming_llm:calibrated"], "7", "needed 7 to compare and 10 more to calibrate on"),
        (["wgkv:calibrated"], "5", "needed 5 to compare and 4 more to calibrate on"),
    ],
)
def test_too_few_published_samples_are_refused(policies, samples, message, tmp_path):
    data, gates = tmp_path / "data", tmp_path / "gates"
    data.mkdir()
    (data / "qa_1.jsonl").write_text("\n".join(map(json.dumps, map(fact, range(8)))))
    save_gates(gates, tiny_gates(load_model(builtin_model("test_model"))), {"tau": 0.5, "window": 4})
    args = ["--policies", *policies, "--tasks", "qa_1", "--data", f"ruler={data}", "--order-contexts", "2"]
    args += ["--gates", str(gates)]
    with pytest.raises(UserError, match=message):
        main([*SMALL, *args, "--budgets", "0.5", "--samples", samples, "--out", str(tmp_path / "run")])


def test_builtin_tasks_are_refused_for_another_model(tmp_path):
    """The built-in tasks are token ids of the built-in vocabulary."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in builtin_model("test_model").iterdir():
        text = file.name == "tokenizer.json"
        (folder / file.name).write_bytes(
            file.read_bytes().replace(b"<|copy|>", b"<|else|>") if text else file.read_bytes()
        )
    with pytest.raises(
        UserError,
        match="--tasks recall needs the built-in model's tokens, .* expected needle, documents, text, niah",
    ):
        main(
            [
                "--model",
                str(folder),
                "--policies",
                "full",
                "--tasks",
                "recall",
                "--out",
                str(tmp_path / "run"),
            ]
        )


def test_a_misspelt_option_ends_in_one_line():
    command = [sys.executable, "-m", "kvjax.evaluate", "--out", "x", "--polices", "full"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert "--policies" in line
