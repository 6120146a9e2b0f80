"""SCBench's metrics (its compute_scores.py and repo_qa_utils.py), each from 0 to 1."""

import re
from collections.abc import Sequence

from kvjax.tasks.prompt import Scoring, all_present
from kvjax.tasks.scbench.code import finder
from kvjax.tasks.text_scores import bleu, characters_f1, rouge_l_sum

LETTERS = "ABCD"
CHOICES = "answer is:", "answer:", "answer is", "option is"
"""Words before a choice, in the order of the search."""
BETWEEN = str.maketrans(dict.fromkeys("\n\"'.,?!{}", " "))
"""Characters that count as white space in the search for a choice."""
NUMBER = re.compile(r"\d+\.\d+|\d+")
ALIKE = 0.8
"""The least BLEU at which a function counts as the one asked for."""


def held(answer: str, expected: Sequence[str]) -> float:
    """Return 1 if the answer contains the first expected string in the same case, else 0."""
    return float(expected[0] in answer)


def held_share(answer: str, expected: Sequence[str]) -> float:
    """Return the share of the expected strings that the answer contains, whatever their case, to hundredths."""
    return round(all_present(answer, expected), 2)


def character_overlap(answer: str, expected: Sequence[str]) -> float:
    """Return the best F1 of the characters with any expected string."""
    return max(characters_f1(answer, true) for true in expected)


def summary_overlap(answer: str, expected: Sequence[str]) -> float:
    """Return rougeLsum with the first expected string."""
    return rouge_l_sum(answer, expected[0])


def first_integer(answer: str, expected: Sequence[str]) -> float:
    """Return 1 if the first run of digits in the answer is the first expected string, else 0."""
    found = re.search(r"[0-9]+", answer)
    return float((found[0] if found else "") == expected[0])


def first_number(true: int | float) -> Scoring:
    """Return the scoring that gives 1 if an answer's first number is the true one, else 0. If the true one is an
    integer, the answer's decimal places are cut off first."""

    def score(answer: str, expected: Sequence[str]) -> float:
        found = NUMBER.search(answer)
        if found is None:
            return 0.0
        number = float(found[0])
        return float((int(number) if isinstance(true, int) else number) == true)

    return score


def choice(answer: str, expected: Sequence[str]) -> float:
    """Return 1 if the answer chooses the true option, else 0. `expected` has the option's text and its letter.

    The choice is the letter that the answer begins with; the whole answer, if it is expected; the text after "answer
    is" and the like; or the first word of letters from A to D.
    """
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
    """Return the scoring that gives 1 if the function in an answer is most similar to the one called `name`, with a
    BLEU of at least `ALIKE`, else 0. `functions`: the names and texts of a repository's functions that are asked for.
    Raises UserError as `finder` does."""
    find = finder(language)

    def score(answer: str, expected: Sequence[str]) -> float:
        words = _words(find(answer))
        likeness = [bleu(words, _words(function)) for _, function in functions]
        most = max(likeness)
        return float(most >= ALIKE and functions[likeness.index(most)][0] == name)

    return score


def _words(code: str) -> list[str]:
    return re.split(r"\s+", code.strip())
