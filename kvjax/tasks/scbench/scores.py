"""SCBench's metrics (its compute_scores.py and repo_qa_utils.py), each from 0 to 1."""

import re
from collections.abc import Sequence

from kvjax.tasks.prompt import Scoring, all_present
from kvjax.tasks.scbench.code import finder
from kvjax.tasks.text_scores import bleu, characters_f1, rouge_l_sum

LETTERS = "ABCD"
CHOICES = "answer is:", "answer:", "answer is", "option is"
"""Words before a choice, in the order in which they are searched."""
BETWEEN = str.maketrans(dict.fromkeys("\n\"'.,?!{}", " "))
"""Replaces characters by white space in the search for a choice."""
NUMBER = re.compile(r"\d+\.\d+|\d+")
MIN_BLEU = 0.8
"""The least BLEU at which a function counts as the expected one."""


def contains_expected(answer: str, expected: Sequence[str]) -> float:
    """Return 1 if the answer contains the first expected string, with the same case; else 0."""
    return float(expected[0] in answer)


def share_contained(answer: str, expected: Sequence[str]) -> float:
    """Return the share of the expected strings that the answer contains, ignoring case, rounded to hundredths."""
    return round(all_present(answer, expected), 2)


def character_overlap(answer: str, expected: Sequence[str]) -> float:
    """Return the best F1 of the characters with any expected string."""
    return max(characters_f1(answer, true) for true in expected)


def summary_overlap(answer: str, expected: Sequence[str]) -> float:
    """Return rougeLsum with the first expected string."""
    return rouge_l_sum(answer, expected[0])


def first_integer(answer: str, expected: Sequence[str]) -> float:
    """Return 1 if the first run of digits in the answer is the first expected string, else 0."""
    match = re.search(r"[0-9]+", answer)
    return float((match[0] if match else "") == expected[0])


def first_number(true: int | float) -> Scoring:
    """Return the scoring that gives 1 if an answer's first number is the true number, else 0.

    If the true number is an integer, the decimal places of the answer's number are cut off.
    """

    def score(answer: str, expected: Sequence[str]) -> float:
        match = NUMBER.search(answer)
        if match is None:
            return 0.0
        number = float(match[0])
        return float((int(number) if isinstance(true, int) else number) == true)

    return score


def choice(answer: str, expected: Sequence[str]) -> float:
    """Return 1 if the answer chooses the true option, else 0. `expected` has the option's text and its letter.

    The choice is the letter at the answer's beginning, the whole answer if it is expected, the text after "answer is"
    and similar words, or else the first word that is part of "ABCD".
    """
    answer = answer.strip()
    if answer[:1] and answer[0] in LETTERS:
        return float(answer[0] in expected)
    if answer in expected:
        return 1.0
    answer = re.sub(" +", " ", answer.translate(BETWEEN))
    for words in CHOICES:
        if (start := answer.find(words)) >= 0:
            return float(answer[start + len(words) + 1 :].startswith(tuple(expected)))
    return float(next((word for word in answer.split() if word in LETTERS), None) in expected)


def function_match(name: str, functions: Sequence[tuple[str, str]], language: str) -> Scoring:
    """Return the scoring that gives 1 if the function in an answer is most similar to the function `name`, else 0.

    Their BLEU must be at least `MIN_BLEU`. functions: the names and texts of the expected functions of all questions
    about the repository. Raises UserError as `finder` does.
    """
    find = finder(language)

    def score(answer: str, expected: Sequence[str]) -> float:
        words = _words(find(answer))
        similarities = [bleu(words, _words(function)) for _, function in functions]
        best = max(similarities)
        return float(best >= MIN_BLEU and functions[similarities.index(best)][0] == name)

    return score


def _words(code: str) -> list[str]:
    return re.split(r"\s+", code.strip())
