"""What a task is: a long context and the questions asked after it, as token ids.

A task of token ids needs no tokenizer at evaluation time and scores exactly. Tasks that are strings in and
strings out (RULER) are another kind, see `text_sample`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from kvjax.errors import UserError
from kvjax.tasks.vocabulary import Vocabulary

Tokens = np.ndarray
"""One-dimensional int32 array of token ids."""


@dataclass(frozen=True)
class Question:
    """Tokens asked right after the context, those that should follow, and the row it is reported under."""

    prompt: Tokens
    answer: Tokens
    kind: str

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True)
class Sample:
    """A context and its questions. Each question is asked on its own, directly after the context."""

    context: Tokens
    questions: tuple[Question, ...]


@runtime_checkable
class Task(Protocol):
    """A source of samples that depends on nothing but a seed and a length."""

    @property
    def name(self) -> str: ...

    @property
    def vocabulary(self) -> Vocabulary: ...

    def sample(self, seed: int, length: int) -> Sample:
        """A sample whose context and any one question with its answer fit into `length` tokens.

        The context has the same number of tokens for every seed of one length. Raises `UserError` if
        `length` is too short for the task.
        """
        ...


def as_tokens(ids: Sequence[int | np.integer] | np.ndarray) -> Tokens:
    return np.asarray(ids, np.int32)


def packed(sample: Sample, length: int, end: int) -> tuple[Tokens, np.ndarray]:
    """One training sequence of `length` tokens: the context, then all questions with answers that fit.

    Places that are left are filled with the token `end`. Returns the tokens and, for each of them, 1.0 where
    it is part of an answer and 0.0 elsewhere (float32 [length]). Raises `UserError` if not even the first
    question fits.
    """
    tokens = np.full(length, end, np.int32)
    weights = np.zeros(length, np.float32)
    filled = len(sample.context)
    if filled + len(sample.questions[0]) > length:
        first = len(sample.questions[0])
        raise UserError(f"a context of {filled} tokens and a question of {first} do not fit into {length}")
    tokens[:filled] = sample.context
    for question in sample.questions:
        answer_start, stop = filled + len(question.prompt), filled + len(question)
        if stop > length:
            break
        tokens[filled:answer_start] = question.prompt
        tokens[answer_start:stop] = question.answer
        weights[answer_start:stop] = 1.0
        filled = stop
    return tokens, weights
