"""Samples of tasks: a context and the questions asked after it, as token ids."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from kvjax.errors import UserError

Tokens = np.ndarray
"""One-dimensional int32 array of token ids."""
Scorer = Callable[[Tokens], float]
"""Scores an answer, from 0 to 1."""


def as_tokens(ids: Sequence[int | np.integer] | np.ndarray) -> Tokens:
    return np.asarray(ids, np.int32)


@dataclass(frozen=True)
class Question:
    """Tokens right after the context, and what should follow them."""

    prompt: Tokens
    """Follows the context directly."""
    answer: Tokens
    """A right answer."""
    kind: str
    """The row that it is reported under."""
    scorer: Scorer | None = None
    """By default 1 for `answer` and 0 for any other; of a text that is given the share of its tokens."""
    reserved: int | None = None
    """Tokens that the model says; by default as many as `answer` has."""
    given: bool = False
    """Whether the model is fed `answer` instead of what it said, and says each token after the true ones before it."""
    stops: bool = False
    """Whether the model's stop tokens end its answer."""
    concluded: Callable[[Tokens], str | None] | None = None
    """Finds the conclusion of an answer to a problem that is answered at length and drawn; None: there is none."""

    @property
    def answer_tokens(self) -> int:
        """Tokens that the model says."""
        return len(self.answer) if self.reserved is None else self.reserved

    def __len__(self) -> int:
        return len(self.prompt) + self.answer_tokens

    def score(self, tokens: Tokens) -> float:
        """Score the model's tokens, from 0 to 1."""
        if self.scorer is not None:
            return self.scorer(tokens)
        if self.given:
            return float(np.mean(tokens == self.answer))
        return float(np.array_equal(tokens, self.answer))


NO_QUESTION = Question(as_tokens([]), as_tokens([]), "")
"""Stands in for the question of a context that has fewer questions than others of its batch."""


@dataclass(frozen=True)
class Sample:
    """A context and its questions. Each question is asked directly after the context, or after those before it."""

    context: Tokens
    questions: tuple[Question, ...]
    """Each asked on its own, unless they are a `conversation`."""
    separable: bool = True
    """Whether the context can be read before a question is known."""
    known: bool = False
    """Whether its only question is known when it is compressed: the question's tokens are then read behind the context,
    observed by the policy, and asked anew of what it kept."""
    conversation: bool = False
    """Whether each question is asked after all that was asked and said before it."""

    @property
    def drawn(self) -> bool:
        """Whether it is a problem, all of it in the context, whose answer is drawn."""
        return self.questions[0].concluded is not None

    @property
    def room(self) -> int:
        """Tokens of the longest of its questions with its answer; of a conversation all of it."""
        return (sum if self.conversation else max)(map(len, self.questions))


@runtime_checkable
class Task(Protocol):
    """A source of samples that depends on nothing but a seed and a length."""

    @property
    def name(self) -> str: ...

    def sample(self, seed: int, length: int) -> Sample:
        """A sample whose context and any one question with its answer fit into `length` tokens.

        Raises `UserError` if `length` is too short for the task.
        """
        ...


def score_agreement(question: Question, reference: Tokens) -> Question:
    """A text that is given, scored by the share of next tokens that are those of `reference`; any other question as it
    is."""
    if not question.given:
        return question
    return dataclasses.replace(question, scorer=lambda tokens: float(np.mean(tokens == reference)))


def score_agreements(samples: Sequence[Sample], references: Sequence[Sequence[Tokens]]) -> list[Sample]:
    """The samples, each text that is given scored by its agreement with `references`: what the full cache said to each
    question of each sample."""
    return [
        dataclasses.replace(sample, questions=tuple(map(score_agreement, sample.questions, own)))
        for sample, own in zip(samples, references, strict=True)
    ]


def asked_after(question: Question, before: Tokens) -> Question:
    """The question with what was asked and said before it."""
    if question is NO_QUESTION:
        return question
    return dataclasses.replace(question, prompt=np.concatenate([before, question.prompt]))


def one_question(samples: Sequence[Sample]) -> list[Sample]:
    """Each sample with one of its questions, another for each."""
    return [
        dataclasses.replace(sample, questions=(sample.questions[index % len(sample.questions)],))
        for index, sample in enumerate(samples)
    ]


def question_aware(samples: Sequence[Sample]) -> list[Sample]:
    """Each question read with its context, and both compressed: question, chat template and answer prefix alike.

    The prompt's last token is the one that asks for the answer's first. It is observed like the others, taken out, and
    asked anew of what was kept: so what is compressed has seen the whole question, no token stands in the sequence
    twice, and the whole answer comes from what was kept. A policy that keeps everything answers as if it read on.
    """
    return [
        dataclasses.replace(
            sample,
            context=np.concatenate([sample.context, q.prompt[:-1]]),
            questions=(dataclasses.replace(q, prompt=as_tokens(q.prompt[-1:])),),
            known=True,
        )
        for sample in samples
        for q in sample.questions
    ]


def check_separable(name: str, samples: Sequence[Sample]) -> None:
    """Refuse samples whose contexts cannot be read before their questions. Raises UserError."""
    if any(not sample.separable for sample in samples):
        raise UserError(
            f"--tasks {name}: its samples hold context and question in one, so the context cannot be read first; use "
            "--question-aware"
        )
