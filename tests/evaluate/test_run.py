"""Tests of whole evaluations of the test-size model: their results, and that a killed run ends like any other."""

import dataclasses
import json

import numpy as np
import pytest

from kvjax.evaluate import run
from kvjax.evaluate.__main__ import main
from kvjax.evaluate.compared import parse_compared
from kvjax.evaluate.config import parse
from kvjax.evaluate.results import Results
from kvjax.evaluate.run import Evaluation
from kvjax.evaluate.sized_tasks import sized_tasks
from kvjax.evaluate.teacher_forcing import Outcome
from kvjax.models import load_model
from tests.evaluate.inputs import TEST_MODEL
from tests.evaluate.whole_run import SMALL, TASKS, lines, without_speeds


@pytest.mark.slow
def test_every_result_is_a_line(evaluated):
    results = lines(evaluated[0])
    wanted = [
        ("full", 1.0),
        ("snapkv", 0.25),
        ("snapkv", 0.5),
        ("wgkv:calibrated", 0.25),
        ("wgkv:calibrated", 0.5),
    ]
    assert [(c["task"], c["policy"], c["budget"]) for c in results] == [
        (task, *pair) for task in ("needle", "text") for pair in wanted
    ]
    for result in results:
        tokens = 122 if result["task"] == "needle" else 110
        assert result["samples"] == (48 if result["task"] == "needle" else 4 * 15)
        assert (result["perplexity"] is None) == (result["task"] == "needle")
        assert np.mean(result["kept"]) == pytest.approx(result["kv_ratio"], abs=1e-4)
        if result["policy"] == "full":
            assert (result["footprint"], result["peak_kv"], result["kv_ratio"]) == (1, 1, 1)
            full_bytes, full_perplexity = result["bytes"], result["perplexity"]
        if result["task"] == "text":
            # the score is agreement with the full cache, and this model's output is much the same with a smaller one
            low, high = {"full": (1, 1), "snapkv": (0.8, 1)}.get(result["policy"], (0.5, 0.99))
            assert low <= result["score"] <= high
            assert result["perplexity"] == pytest.approx(full_perplexity, rel=0.5)
        if result["policy"] == "snapkv":
            assert result["kv_ratio"] == pytest.approx(int(result["budget"] * tokens) / tokens, abs=1e-5)
        if result["policy"] == "wgkv:calibrated":
            assert result["kv_ratio"] == pytest.approx(result["budget"], rel=0.1)
            assert result["peak_kv"] < 0.9
        assert result["bytes"] <= full_bytes
        assert 0 < result["footprint"] <= 1
        assert result["decode_tok_s"] > 0
        # policies that share a reading have no prefill speed of their own
        assert (result["prefill_tok_s"] is None) == (result["policy"] != "wgkv:calibrated")
        assert (result["question_aware"], result["published"], result["seed"]) == (False, False, 0)
        assert result["described"] == result["policy"]
        assert result["sized_by"] == ("nothing" if result["policy"] == "full" else "budget")


@pytest.mark.slow
def test_every_answer_is_written_with_its_score(evaluated):
    folder = evaluated[0]
    for result in lines(folder):
        name = f"{result['task']}-{result['context']}-{result['policy']}-{result['budget']:g}.jsonl"
        rows = [json.loads(line) for line in (folder / "answers" / name).read_text().splitlines()]
        assert np.mean([row["score"] for row in rows]) == pytest.approx(result["score"], abs=1e-6)
        assert {row["kind"] for row in rows} == set(result["by_kind"])
        if result["task"] == "needle":
            assert len(rows) == result["samples"]
            assert all((row["text"] == row["true"]) == (row["score"] == 1) for row in rows)


@pytest.mark.slow
def test_another_budget_compiles_nothing(evaluated):
    """τ is traced, so the second result of wgkv runs the first one's programs."""
    compile_counts = evaluated[1]
    assert compile_counts[3] > compile_counts[2]
    for first in (3, 8):
        assert lines(evaluated[0])[first]["policy"] == "wgkv:calibrated"
        assert compile_counts[first + 1] == compile_counts[first]


@pytest.mark.slow
def test_a_killed_run_continues_with_the_same_results(arguments, evaluated, tmp_path, monkeypatch):
    folder, add = tmp_path / "run", Results.add

    def killed_in_the_fourth(self, result):
        if len(self.finished) == 3:
            with self._file.open("a") as out:
                out.write('{"policy": "wg')
            raise KeyboardInterrupt
        add(self, result)

    monkeypatch.setattr(Results, "add", killed_in_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        main([*arguments, *TASKS, "--out", str(folder)])
    assert not (folder / "report.md").exists()
    monkeypatch.setattr(Results, "add", add)
    main([*arguments, *TASKS, "--out", str(folder)])
    assert without_speeds(lines(folder)) == without_speeds(lines(evaluated[0]))


@pytest.mark.thorough
def test_question_aware_compression_keeps_the_entries_that_questions_need(arguments, evaluated, tmp_path):
    """Each context is read with its question, and one more token asks for the answer from the kept entries. The entries
    that the question attends to are kept, so nearly all is answered that the full cache answers."""
    few = ["--budgets", "0.25", "--tasks", "needle", "--question-aware", "--out", str(tmp_path / "run")]
    main([*arguments[: arguments.index("--policies")], "--policies", "snapkv", *few])
    (aware,) = lines(tmp_path / "run")
    results = {(c["task"], c["policy"], c["budget"]): c for c in lines(evaluated[0])}
    full, blind = results["needle", "full", 1.0], results["needle", "snapkv", 0.25]
    assert aware["question_aware"]
    assert aware["samples"] == blind["samples"]
    assert aware["score"] >= 0.9 * full["score"] > 4 * blind["score"]
    assert aware["kv_ratio"] == pytest.approx(int(0.25 * 124) / 124, abs=1e-5)
    # 124 tokens are read, then the one that asks, after 31 entries; before, that one was read after all of them
    whole, last = 124 * 125 / 2, 32
    assert aware["footprint"] == pytest.approx((whole + last) / (125 * 126 / 2), abs=1e-5)
    assert aware["footprint_held"] == pytest.approx((whole + last + 125) / (125 * 126 / 2), abs=1e-5)
    assert "**Question-aware**" in (tmp_path / "run" / "report.md").read_text()


def test_rulers_published_data_is_scored_as_text(tmp_path):
    """The model writes ASCII, so the expected answer is a letter, which it writes, or a sign that it never writes."""
    facts = "The owl is grey and sits on a branch of the old tree.\n"
    row = {
        "input": facts + "Question: Is the owl grey?\nAnswer:",
        "outputs": ["e", "a", " "],
        "length": 9,
    }
    rows = [row, row, row | {"outputs": ["§"]}, row | {"outputs": ["§"]}]
    (tmp_path / "qa_1.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ["--policies", "full", "--tasks", "qa_1", "--samples", "4", "--data", f"ruler={tmp_path}"]
    main([*SMALL, *options, "--out", str(tmp_path / "run")])
    (result,) = lines(tmp_path / "run")
    assert result["published"]
    assert (result["samples"], result["score"], result["by_kind"]) == (4, 0.5, {"qa_1": 0.5})
    report = (tmp_path / "run" / "report.md").read_text()
    assert "RULER's own data: qa_1" in report
    # the table's rows have equal columns even if nothing is compared with the full cache
    table = [line for line in report.splitlines() if line.startswith("|")][:3]
    assert [line.count("|") for line in table] == [4, 4, 4]


def test_the_window_for_ordering_heads_follows_from_the_order_length(tmp_path, monkeypatch):
    """With the window of much longer contexts, every head would see everything, and all would be equally important."""
    config = parse([
        *TEST_MODEL, "--policies", "head_pattern:calibrated", "--tasks", "needle", "--context", "2048",
        "--order-length", "512",
        "--order-contexts", "2", "--samples", "3", "--out", str(tmp_path / "run"),
    ])  # fmt: skip
    evaluation, found = Evaluation(config, load_model(config.model), sized_tasks(config)), []
    monkeypatch.setattr(run, "TeacherForcing", lambda *given: lambda *ran: Outcome(0.0, 0.0))
    monkeypatch.setattr(
        run, "orders", lambda loss, shape, window, folder, _: found.append((window, folder)) or {}
    )
    search = evaluation._pattern_search(evaluation.tasks[0], parse_compared("head_pattern:calibrated"))
    task = evaluation.tasks[0]
    contexts = evaluation.choice_samples[task.name, task.length].for_order
    name = f"needle-512-window-16-{dataclasses.replace(task, samples=contexts).digest}"
    assert found == [(16, tmp_path / "run" / "heads" / name)]
    assert search.window == 64
