"""Questions about documents, made from the text by rule: which word comes next in a sentence?

The model is asked to quote a sentence. The beginning of its answer is given: the words before a distinctive word (a
number, a name or a term), which occurs nowhere else in the context and should come next. The words are not part of the
question, because a small model that reads them twice copies the quotation mark after them instead of looking up the
sentence.
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
"""Kinds of questions, by the part of the text with the sentence."""
PER_THIRD = 2
QUESTIONS = PER_THIRD * len(THIRDS)
FEWEST, MOST = 6, 16
"""Words before the distinctive one. Sentences with fewer are not used; of more words, the last `MOST` are given."""
LONGEST = 24
"""The most characters of a distinctive word."""
GIVEN_TOKENS = 48
"""The most tokens of the words before the distinctive one."""

WORD = re.compile(r"\S+")
EDGE = "\"'`“”‘’«».,;:!?()[]{}<>*"
"""Characters that are stripped from the ends of a word."""
DISTINCTIVE = re.compile(r"[0-9A-Z]|\w[-_./:@]\w")
"""A number, a name or a term of several parts. The first words of a sentence, which may match too, are not used."""


def document_questions(
    documents: Sequence[Document], encode: PromptEncoder, count: Count, length: int
) -> list[Example]:
    """Return examples of at most `length` tokens with `QUESTIONS` questions each. Their passages share no paragraph.

    Passages without enough distinctive words in each third are left out. Raises UserError if `length` is too short.
    """
    frame = Example(OPENING + "\n", (ExampleQuestion(QUESTION, "\n", ("",), "all", RESERVED, ""),))
    frame_size = prompt_size(frame, encode) + GIVEN_TOKENS
    if frame_size >= length:
        raise UserError(f"documents: {length} tokens are too few, the questions alone take {frame_size}")
    examples = (
        _example(passage, count, index)
        for index, passage in enumerate(passages(documents, length - frame_size))
    )
    return [example for example in examples if example is not None and prompt_size(example, encode) <= length]


def _example(passage: str, count: Count, seed: int) -> Example | None:
    """Return the passage with random questions from each third; None if there are too few."""
    rng, candidates, questions = np.random.default_rng(seed), distinctive_words(passage), []
    if candidates:
        given, words = (
            count([given for _, given, _ in candidates]),
            count([f" {word}" for *_, word in candidates]),
        )
        fits = [
            before <= GIVEN_TOKENS and after <= RESERVED for before, after in zip(given, words, strict=True)
        ]
        candidates = list(itertools.compress(candidates, fits))
    for third, kind in enumerate(THIRDS):
        inside = [(given, word) for place, given, word in candidates if int(place * len(THIRDS)) == third]
        if len(inside) < PER_THIRD:
            return None
        for index in sorted(rng.choice(len(inside), PER_THIRD, replace=False)):
            given, word = inside[index]
            questions.append(ExampleQuestion(QUESTION, "\n" + given, (word,), "all", RESERVED, kind))
    return Example(f"{OPENING}{passage}\n\n", tuple(questions))


def distinctive_words(passage: str) -> list[tuple[float, str, str]]:
    """Return the first distinctive word of each sentence, as its place (0 to 1), the words before it, and the word.

    Neither the words before nor the word occur anywhere else, ignoring case.
    """
    candidates, context, start = [], (OPENING + passage + QUESTION).lower(), 0
    for sentence in split_sentences(passage):
        words = list(WORD.finditer(sentence))
        for index in range(FEWEST, len(words)):
            word = words[index].group().strip(EDGE)
            if not DISTINCTIVE.search(word) or not 3 <= len(word) <= LONGEST:
                continue
            given = sentence[words[max(0, index - MOST)].start() : words[index - 1].end()]
            if context.count(word.lower()) == context.count(given.lower()) == 1:
                candidates.append(((start + words[index].start()) / len(passage), given, word))
                break
        start += len(sentence)
    return candidates
