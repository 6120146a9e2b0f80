"""LongBench's metrics (its metrics.py and eval.py), each from 0 to 1.

The score of an answer is the best that it gets with any of the true ones.
"""

import re
from collections.abc import Callable, Sequence

from kvjax.tasks.prompt import Scoring

CODE_MARKS = "`", "#", "//"
"""A line of code that has one of these is a comment, or not code."""


def best(score: Callable[[str, str], float], part: Callable[[str], str] = str) -> Scoring:
    """Return a scoring that takes the best score with any of the true answers. `part` picks the scored part of the
    answer."""
    return lambda answer, expected: max(score(part(answer), true) for true in expected)


def first_line(answer: str) -> str:
    """Return the first line of an answer, which may continue with examples of its own."""
    return answer.lstrip("\n").partition("\n")[0]


def code_line(answer: str) -> str:
    """Return the first line without a mark of comments or of code blocks; "" if there is none."""
    lines = answer.lstrip("\n").split("\n")
    return next((line for line in lines if not any(mark in line for mark in CODE_MARKS)), "")


def number_share(answer: str, true: str) -> float:
    """Return the share of the numbers in the answer that are the true one."""
    numbers = re.findall(r"\d+", answer)
    return numbers.count(true) / len(numbers) if numbers else 0.0


def paragraph_share(answer: str, true: str) -> float:
    """Return `number_share` for a true answer such as "Paragraph 7" or "段落7", whose first number is the true one."""
    return number_share(answer, "".join(re.findall(r"\d+", true)[:1]))


def class_share(classes: Sequence[str]) -> Callable[[str, str], float]:
    """Return a function that scores 1 over the number of classes that the answer names, or 0 if the true one is not
    among them. Classes whose names are part of the true one's do not count. As in the official scorer, a class that
    comes right after such a class does count."""

    def score(answer: str, true: str) -> float:
        named = [name for name in classes if name in answer]
        at = 0
        while at < len(named):
            if named[at] in true and named[at] != true:
                del named[at]
            at += 1
        return 1 / len(named) if true in named else 0.0

    return score
