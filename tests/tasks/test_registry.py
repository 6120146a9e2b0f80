"""Test a new suite, added as the documentation describes, and unknown names of data."""

import json
import re
from pathlib import Path

import pytest

from kvjax.errors import UserError
from kvjax.evaluate.config import parse
from kvjax.evaluate.sized_tasks import sized_tasks
from kvjax.evaluate.sizing import check_policies
from kvjax.tasks import registry
from tests.evaluate.inputs import SMALL

PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"


@pytest.fixture
def registered(monkeypatch):
    """Register the documentation's `my_qa.py`, as the line in `SUITES` would."""
    (code,) = re.findall(r"```python\n(# kvjax/tasks/my_qa.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    module = {}
    exec(code, module)
    for name in module["SUITE"].tasks:
        monkeypatch.setitem(registry.TASKS, name, module["SUITE"])


def test_an_evaluation_finds_the_task_of_a_new_suite(registered, tmp_path):
    row = {"context": "The owl of house 7 is grey.", "question": "Which owl?", "answers": ["grey", "Grey"]}
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    options = ["--tasks", "my_qa", "--policies", "full", "--samples", "2", "--out", str(tmp_path / "run")]
    config = parse([*SMALL, *options, "--data", f"my_qa={file}"])
    check_policies(config)
    (found,) = sized_tasks(config)
    (question,) = found.samples[0].questions
    assert (found.name, found.published, len(found.samples), question.kind) == ("my_qa", True, 2, "my_qa")
    assert question.score(question.answer) == 1


def test_unknown_names_of_data_are_refused(tmp_path):
    for data, message in (
        ("sqad=x", "--data: unknown name 'sqad'; the nearest known: squad"),
        ("squad", "--data squad: expected NAME=PATH"),
    ):
        with pytest.raises(UserError, match=message):
            check_policies(parse(["--out", str(tmp_path), "--data", data]))
