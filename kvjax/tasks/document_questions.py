"""Questions about natural documents, made from the text by rule: which word comes next?

A question gives the words of a sentence before a distinctive one: a number, a name or a term, which occurs nowhere else
in the context. The model is asked to quote a sentence. Its answer begins with those words, and the distinctive one
should follow. In this way the sentence's beginning stands in the prompt once. A small model that reads it twice copies
its end (a quotation mark) instead of looking the sentence up.
"""

import itertools
import re
from collections.abc import Sequence

import numpy as np

from kvjax.errors import UserError
from kvjax.tasks.passages import Count, Document, passages
from kvjax.tasks.prompt import Example, ExampleQuestion, PromptEncoder, prompt_size
from kvjax.tasks.ruler.haystack import split_sentences

OPENING = "Below is a text. You will be asked to quote from it.\n\n"
QUESTION = "Quote one sentence of the text above, word for word."
RESERVED = 12
"""The most tokens of the distinctive word, and of the answer."""
THIRDS = ("1 of 3", "2 of 3", "3 of 3")
"""Kinds of questions, by the part of the text that the sentence is in."""
PER_THIRD = 2
QUESTIONS = PER_THIRD * len(THIRDS)
FEWEST, MOST = 6, 16
"""Words before the distinctive one. A sentence with fewer is not asked about; if it has more, the last are given."""
LONGEST = 24
"""The most characters of a distinctive word."""
ROOM = 48
"""The most tokens of the words before the distinctive one."""

WORD = re.compile(r"\S+")
EDGE = "\"'`“”‘’«».,;:!?()[]{}<>*"
"""Characters that are not part of a word at its ends."""
DISTINCTIVE = re.compile(r"[0-9A-Z]|\w[-_./:@]\w")
"""A number, a name or a term of several parts. A sentence's first words, which may begin so, are not asked about."""


def document_questions(
    documents: Sequence[Document], encode: PromptEncoder, count: Count, length: int
) -> list[Example]:
    """Return examples of at most `length` tokens with `QUESTIONS` questions each. Their passages share no paragraph.

    A passage with fewer distinctive words in one of its thirds is left out.

    Raises UserError for a length that holds no passage.
    """
    frame = Example(OPENING + "\n", (ExampleQuestion(QUESTION, "\n", ("",), "all", RESERVED, ""),))
    room = length - prompt_size(frame, encode) - ROOM
    if room < 1:
        raise UserError(f"documents: {length} tokens are too few, the questions alone take {length - room}")
    examples = (_example(passage, count, index) for index, passage in enumerate(passages(documents, room)))
    return [example for example in examples if example is not None and prompt_size(example, encode) <= length]


def _example(passage: str, count: Count, seed: int) -> Example | None:
    """Return the passage with questions drawn from each third; None if there are too few."""
    rng, found, questions = np.random.default_rng(seed), distinctive_words(passage), []
    if found:
        given, words = count([given for _, given, _ in found]), count([f" {word}" for *_, word in found])
        fits = [before <= ROOM and after <= RESERVED for before, after in zip(given, words, strict=True)]
        found = list(itertools.compress(found, fits))
    for third, kind in enumerate(THIRDS):
        inside = [(given, word) for at, given, word in found if int(at * len(THIRDS)) == third]
        if len(inside) < PER_THIRD:
            return None
        for index in sorted(rng.choice(len(inside), PER_THIRD, replace=False)):
            given, word = inside[index]
            questions.append(ExampleQuestion(QUESTION, "\n" + given, (word,), "all", RESERVED, kind))
    return Example(f"{OPENING}{passage}\n\n", tuple(questions))


def distinctive_words(passage: str) -> list[tuple[float, str, str]]:
    """Return the first distinctive word of each sentence: its place (0 to 1), the words before it as they are written,
    and the word. Neither occurs anywhere else, whatever its case."""
    found, whole, start = [], (OPENING + passage + QUESTION).lower(), 0
    for sentence in split_sentences(passage):
        words = list(WORD.finditer(sentence))
        for index in range(FEWEST, len(words)):
            word = words[index].group().strip(EDGE)
            if not DISTINCTIVE.search(word) or not 3 <= len(word) <= LONGEST:
                continue
            given = sentence[words[max(0, index - MOST)].start() : words[index - 1].end()]
            if whole.count(word.lower()) == whole.count(given.lower()) == 1:
                found.append(((start + words[index].start()) / len(passage), given, word))
                break
        start += len(sentence)
    return found
