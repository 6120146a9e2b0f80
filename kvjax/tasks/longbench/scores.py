"""LongBench's metrics (its metrics.py and eval.py), each from 0 to 1.

An answer is scored with each of the true answers, and its best score counts.
"""

import re
from collections.abc import Callable, Sequence

from kvjax.tasks.prompt import Scoring

CODE_MARKS = "`", "#", "//"
"""Marks of comments and of code blocks."""


def best(score: Callable[[str, str], float], part: Callable[[str], str] = str) -> Scoring:
    """Return a scoring with the best score over the true answers. `part` extracts the scored part of the answer."""
    return lambda answer, expected: max(score(part(answer), true) for true in expected)


def first_line(answer: str) -> str:
    """Return the first line of an answer, after which the model may have made up further examples."""
    return answer.lstrip("\n").partition("\n")[0]


def code_line(answer: str) -> str:
    """Return the first line without a mark of comments or of code blocks; "" if there is none."""
    lines = answer.lstrip("\n").split("\n")
    return next((line for line in lines if not any(mark in line for mark in CODE_MARKS)), "")


def number_share(answer: str, true: str) -> float:
    """Return the share of the numbers in the answer that equal the true number."""
    numbers = re.findall(r"\d+", answer)
    return numbers.count(true) / len(numbers) if numbers else 0.0


def paragraph_share(answer: str, true: str) -> float:
    """Return `number_share` for the first number of a true answer such as "Paragraph 7" or "段落7"."""
    return number_share(answer, "".join(re.findall(r"\d+", true)[:1]))


def class_share(classes: Sequence[str]) -> Callable[[str, str], float]:
    """Return a function that scores 1 / (number of classes in the answer), or 0 if the true class is not among them.

    Classes whose names are part of the true class's name do not count. As in the official scorer, which removes items
    from the list over which it iterates, the class right after such a class always counts.
    """

    def score(answer: str, true: str) -> float:
        named = [name for name in classes if name in answer]
        index = 0
        while index < len(named):
            if named[index] in true and named[index] != true:
                del named[index]
            index += 1
        return 1 / len(named) if true in named else 0.0

    return score
