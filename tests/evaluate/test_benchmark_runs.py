"""Tests of a whole evaluation on rows of SCBench and LongBench: their results, and the report about them."""

import pytest

from kvjax.errors import UserError
from kvjax.evaluate.__main__ import main
from tests.evaluate.whole_run import SMALL, lines
from tests.tasks.benchmark_inputs import longbench_row, turn, write


@pytest.mark.slow
def test_questions_in_turn_and_cut_contexts(tmp_path):
    """The model writes ASCII, so the expected answer is a letter, which it writes, or a sign that it never writes."""
    facts = "The owl is grey and sits on a branch of the old tree. " * 4
    turns = [turn("Is it?", "e"), turn("Is it not?", "§")]
    row = {"id": 0, "context": facts, "multi_turns": turns}
    write(tmp_path, {"scbench_many_shot": [row, row, row | {"multi_turns": turns[:1]}]})
    write(tmp_path, {"lcc": [longbench_row("", ["x"], "x = 1\n" * 40)] * 3})
    own = ["--policies", "full", "--tasks", "scbench_many_shot", "longbench_lcc", "--samples", "3", "--turns"]
    data = ["--data", f"scbench={tmp_path}", f"longbench={tmp_path}", "--out", str(tmp_path / "run")]
    main([*SMALL, *own, "own", *data])
    asked, code = lines(tmp_path / "run")
    assert asked["by_kind"] == {"turn 1": 1.0, "turn 2": 0.0}
    assert (asked["samples"], asked["score"], asked["footprint"]) == (5, 0.6, 1.0)
    assert (code["task"], code["samples"]) == ("longbench_lcc", 3)
    assert code["metric"] == "similarity of the first line of code"
    report = (tmp_path / "run" / "report.md").read_text()
    assert (
        "scbench_many_shot: questions were asked in turn, after the earlier questions and the model's answers"
        in report
    )
    with pytest.raises(UserError, match="holds results with --turns own, got golden: name another folder"):
        main([*SMALL, *own, "golden", *data])
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
