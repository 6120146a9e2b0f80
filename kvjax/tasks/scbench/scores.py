"""SCBench's metrics (its compute_scores.py and repo_qa_utils.py): what an answer is worth, from 0 to 1."""

import re
from collections.abc import Sequence

from kvjax.tasks.prompt import Scoring, all_present
from kvjax.tasks.scbench.code import finder
from kvjax.tasks.text_scores import bleu, characters_f1, rouge_l_sum

LETTERS = "ABCD"
CHOICES = "answer is:", "answer:", "answer is", "option is"
"""Words before a choice, in the order in which they are looked for."""
BETWEEN = str.maketrans(dict.fromkeys("\n\"'.,?!{}", " "))
"""Counts as white space when a choice is looked for."""
NUMBER = re.compile(r"\d+\.\d+|\d+")
ALIKE = 0.8
"""BLEU from which on a function is the one that was asked for."""


def held(answer: str, expected: Sequence[str]) -> float:
    """Whether the answer has the first, to the letter."""
    return float(expected[0] in answer)


def held_share(answer: str, expected: Sequence[str]) -> float:
    """The share that the answer has, whatever their case, to hundredths."""
    return round(all_present(answer, expected), 2)


def character_overlap(answer: str, expected: Sequence[str]) -> float:
    """F1 of the characters, the best with any."""
    return max(characters_f1(answer, true) for true in expected)


def summary_overlap(answer: str, expected: Sequence[str]) -> float:
    """rougeLsum with the first."""
    return rouge_l_sum(answer, expected[0])


def first_integer(answer: str, expected: Sequence[str]) -> float:
    """Whether the first run of digits is the first."""
    found = re.search(r"[0-9]+", answer)
    return float((found[0] if found else "") == expected[0])


def first_number(true: int | float) -> Scoring:
    """Whether the first number is the true one; of an integer, whether it is once its places are cut off."""

    def score(answer: str, expected: Sequence[str]) -> float:
        found = NUMBER.search(answer)
        if found is None:
            return 0.0
        number = float(found[0])
        return float((int(number) if isinstance(true, int) else number) == true)

    return score


def choice(answer: str, expected: Sequence[str]) -> float:
    """Whether the answer chooses one of `expected`, the true option's text and its letter: by the letter that it begins
    with; by being the text; by what follows "answer is" and the like; or by the first word of the letters A to D."""
    answer = answer.strip()
    if answer[:1] and answer[0] in LETTERS:
        return float(answer[0] in expected)
    if answer in expected:
        return 1.0
    answer = re.sub(" +", " ", answer.translate(BETWEEN))
    for words in CHOICES:
        if (at := answer.find(words)) >= 0:
            return float(answer[at + len(words) + 1 :].startswith(tuple(expected)))
    return float(next((word for word in answer.split() if word in LETTERS), None) in expected)


def function_match(name: str, functions: Sequence[tuple[str, str]], language: str) -> Scoring:
    """Whether of a repository's functions that are asked for, each with its name, the one called `name` is the most
    like the one in the answer, and is so by `ALIKE` at least. Raises UserError as `finder` does."""
    find = finder(language)

    def score(answer: str, expected: Sequence[str]) -> float:
        words = _words(find(answer))
        likeness = [bleu(words, _words(function)) for _, function in functions]
        most = max(likeness)
        return float(most >= ALIKE and functions[likeness.index(most)][0] == name)

    return score


def _words(code: str) -> list[str]:
    return re.split(r"\s+", code.strip())
