"""Run the Python blocks of docs/getting-started.md in order, as one session."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "getting-started.md"


@pytest.mark.thorough
def test_tour_runs_and_prints_the_documented_lines(tmp_path, monkeypatch, capsys):
    tour, _ = PAGE.read_text().split("## Your own model")
    monkeypatch.chdir(tmp_path)
    session = {}
    for block in re.findall(r"```python\n(.*?)```", tour, re.DOTALL):
        exec(compile(block, PAGE.name, "exec"), session)
    printed = capsys.readouterr().out
    for line in re.findall(r"prints? `([^`]+)`", tour):
        assert " ".join(line.split()) in printed
    assert session["right"] == len(session["answers"]) == 16
    assert (tmp_path / "context").is_dir()
