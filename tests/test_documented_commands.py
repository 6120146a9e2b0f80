"""The programs accept the evaluations and trainings that the docs and the configurations name."""

import re
import shlex
from pathlib import Path

import pytest

from kvjax.evaluate.compared import compared_policies
from kvjax.evaluate.config import parse as parse_evaluation
from kvjax.train.config import parse as parse_training

ROOT = Path(__file__).parent.parent
OPEN = {"--seed S": "--seed 1", "$S": "1", "$B": "256", "$L": "0.5"}
"""Values for the seed, the size and the weight that commands leave open."""
NEED_A_RUN = {"--resume", "--init"}
"""Options that read an earlier run, which is not here."""


def lines():
    """Yield a file's name and a line that may be a command."""
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "gates").rglob("*.md")):
        text = page.read_text()
        for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
            yield from ((page.name, line) for line in block.replace("\\\n", " ").splitlines())
        yield from ((page.name, " ".join(code.split())) for code in re.findall(r"`(python [^`]+)`", text))
    for file in (ROOT / "configs").rglob("*.yaml"):
        yield from ((file.name, line) for line in re.findall(r"^#   (.+)$", file.read_text(), re.MULTILINE))


def commands(program):
    """Return the arguments of each command of a program."""
    found = []
    for name, line in lines():
        if line.startswith(f"python -m kvjax.{program} ") and "…" not in line:
            for place, value in OPEN.items():
                line = line.replace(place, value)
            words = shlex.split(line, comments=True)[3:]
            if not NEED_A_RUN & set(words):
                found.append(pytest.param(words, id=f"{name}-{len(found)}"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("words", commands("evaluate"))
def test_evaluations_are_accepted(words):
    compared_policies(parse_evaluation(words))


@pytest.mark.slow
@pytest.mark.parametrize("words", commands("train"))
def test_trainings_are_accepted(words):
    parse_training(words)
