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
    """A question after the context, and its answer."""

    prompt: Tokens
    """The question's tokens. They follow the context directly."""
    answer: Tokens
    """A right answer."""
    kind: str
    """The name under which its score is reported."""
    scorer: Scorer | None = None
    """Scores the answer. By default 1 for `answer`, else 0; the share of right tokens if it is teacher-forced."""
    reserved: int | None = None
    """The most tokens of the model's answer. By default as many as `answer` has."""
    teacher_forced: bool = False
    """True if the model is fed `answer` instead of its own tokens, and predicts each token after the true ones."""
    stops: bool = False
    """True if the model's stop tokens end its answer."""
    concluded: Callable[[Tokens], str | None] | None = None
    """Returns the conclusion of an answer to a contest's problem, None if it has none. None for other questions."""

    @property
    def answer_tokens(self) -> int:
        """The most tokens of the model's answer."""
        return len(self.answer) if self.reserved is None else self.reserved

    def __len__(self) -> int:
        return len(self.prompt) + self.answer_tokens

    def score(self, tokens: Tokens) -> float:
        """Return the score of the model's tokens, from 0 to 1."""
        if self.scorer is not None:
            return self.scorer(tokens)
        if self.teacher_forced:
            return float(np.mean(tokens == self.answer))
        return float(np.array_equal(tokens, self.answer))


NO_QUESTION = Question(as_tokens([]), as_tokens([]), "")
"""Placeholder for a context that has fewer questions than others in its batch."""


@dataclass(frozen=True)
class Sample:
    """A context and its questions."""

    context: Tokens
    questions: tuple[Question, ...]
    """Each is asked on its own, directly after the context, unless they are a `conversation`."""
    separable: bool = True
    """True if the context can be read before a question is known."""
    question_known: bool = False
    """True if the only question is known when the context is compressed. The question's tokens are then read after the
    context, observed by the policy, and asked again from the entries that it kept."""
    source: int | None = None
    """A number that samples about the same context or question share; None if there are no such samples."""
    conversation: bool = False
    """True if each question is asked after all that was asked and answered before it."""

    @property
    def is_contest(self) -> bool:
        """True if the context is a contest's problem, whose answers are sampled."""
        return self.questions[0].concluded is not None

    @property
    def tokens_after_context(self) -> int:
        """Tokens of the longest question with its answer; for a conversation, of all questions with their answers."""
        return (sum if self.conversation else max)(map(len, self.questions))


@runtime_checkable
class Task(Protocol):
    """A source of samples, deterministic from a seed and a length."""

    @property
    def name(self) -> str: ...

    def sample(self, seed: int, length: int) -> Sample:
        """Return a sample whose context and any one question with its answer fit into `length` tokens.

        Raises `UserError` if `length` is too short for the task.
        """
        ...


def score_agreement(question: Question, reference: Tokens) -> Question:
    """Return a teacher-forced question scored by the share of its next tokens that agree with `reference`.

    Other questions are returned unchanged.
    """
    if not question.teacher_forced:
        return question
    return dataclasses.replace(question, scorer=lambda tokens: float(np.mean(tokens == reference)))


def score_agreements(samples: Sequence[Sample], references: Sequence[Sequence[Tokens]]) -> list[Sample]:
    """Return the samples with teacher-forced questions scored by agreement with `references`.

    references: the full cache's answers, by sample and question.
    """
    return [
        dataclasses.replace(sample, questions=tuple(map(score_agreement, sample.questions, answers)))
        for sample, answers in zip(samples, references, strict=True)
    ]


def asked_after(question: Question, before: Tokens) -> Question:
    """Return the question with the earlier questions and answers (`before`) prepended."""
    if question is NO_QUESTION:
        return question
    return dataclasses.replace(question, prompt=np.concatenate([before, question.prompt]))


def one_question(samples: Sequence[Sample]) -> list[Sample]:
    """Return each sample with a single question: sample i keeps its question i, modulo their number."""
    return [
        dataclasses.replace(sample, questions=(sample.questions[index % len(sample.questions)],))
        for index, sample in enumerate(samples)
    ]


def question_aware(samples: Sequence[Sample]) -> list[Sample]:
    """Return a sample for each question, in which context and question are compressed together, with chat template and
    answer prefix.

    The prompt's last token predicts the first token of the answer. It is observed like the others, removed, and fed
    again after the compression. So the compression observes the whole question, no token occurs twice, and the whole
    answer comes from the entries kept. A policy that keeps everything answers as if it had read the prompt in one go.
    """
    return [
        dataclasses.replace(
            sample,
            context=np.concatenate([sample.context, q.prompt[:-1]]),
            questions=(dataclasses.replace(q, prompt=as_tokens(q.prompt[-1:])),),
            question_known=True,
            source=index if sample.source is None else sample.source,
        )
        for index, sample in enumerate(samples)
        for q in sample.questions
    ]


def check_separable(name: str, samples: Sequence[Sample]) -> None:
    """Raise UserError if a sample's context cannot be read before its questions."""
    if any(not sample.separable for sample in samples):
        raise UserError(
            f"--tasks {name}: its samples hold context and question in one, so the context cannot be read first; use "
            "--question-aware"
        )
