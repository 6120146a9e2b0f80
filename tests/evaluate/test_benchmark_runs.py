"""Tests of a whole evaluation on rows of SCBench and LongBench: their results, and the report about them."""

import pytest

from kvjax.errors import UserError
from kvjax.evaluate.__main__ import main
from tests.evaluate.whole_run import SMALL, lines
from tests.tasks.benchmark_inputs import longbench_row, turn, write


@pytest.mark.slow
def test_an_evaluation_on_scbench_and_longbench(tmp_path):
    """The model writes ASCII, so the expected answer is a letter, which it writes, or a sign that it never writes."""
    facts = "The owl is grey and sits on a branch of the old tree. " * 4
    turns = [turn("Is it?", "e"), turn("Is it not?", "§")]
    row = {"id": 0, "context": facts, "multi_turns": turns}
    write(tmp_path, {"scbench_many_shot": [row, row, row | {"multi_turns": turns[:1]}]})
    write(tmp_path, {"lcc": [longbench_row("", ["x"], "x = 1\n" * 40)] * 3})
    options = [
        "--policies",
        "full",
        "--tasks",
        "scbench_many_shot",
        "longbench_lcc",
        "--samples",
        "3",
        "--turns",
    ]
    data = ["--data", f"scbench={tmp_path}", f"longbench={tmp_path}", "--out", str(tmp_path / "run")]
    main([*SMALL, *options, "own", *data])
    questions_result, code_result = lines(tmp_path / "run")
    assert questions_result["by_kind"] == {"turn 1": 1.0, "turn 2": 0.0}
    assert (questions_result["samples"], questions_result["score"], questions_result["footprint"]) == (
        5,
        0.6,
        1.0,
    )
    assert (code_result["task"], code_result["samples"]) == ("longbench_lcc", 3)
    assert code_result["metric"] == "similarity of the first line of code"
    report = (tmp_path / "run" / "report.md").read_text()
    assert (
        "scbench_many_shot: questions were asked in turn, after the earlier questions and the model's answers"
        in report
    )
    with pytest.raises(UserError, match="holds results with --turns own, got golden: name another folder"):
        main([*SMALL, *options, "golden", *data])
    with pytest.raises(UserError, match="--turns is for SCBench's tasks, got needle"):
        main(
            [
                *SMALL,
                "--tasks",
                "needle",
                "--policies",
                "full",
                "--turns",
                "own",
                "--out",
                str(tmp_path / "other"),
            ]
        )
