"""What is read and what is asked, as token ids: the form that every task takes before a model sees it."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvjax.tasks.task import Sample, Tokens, as_tokens


@dataclass(frozen=True)
class Asked:
    """A question: `prompt` follows the context, then the model says `answer_tokens` tokens."""

    prompt: Tokens
    answer_tokens: int
    score: Callable[[Tokens], float]
    """What they are worth, from 0 to 1."""
    kind: str
    """The row that it is reported under."""
    given: Tokens | None = None
    """The model is fed these instead of what it said, and says each token after the true ones before it."""
    stops: bool = False
    """Whether the model's stop tokens end it."""
    expected: Tokens | None = None
    """A right answer, where none is given."""

    @property
    def right(self) -> Tokens:
        """The tokens of a right answer."""
        answer = self.expected if self.given is None else self.given
        assert answer is not None
        return answer


@dataclass(frozen=True)
class Context:
    """A context and its questions, each asked on its own directly after it."""

    tokens: Tokens
    questions: tuple[Asked, ...]
    separable: bool = True
    """Whether it can be read before a question is known."""
    known: bool = False
    """Whether its only question is known when it is compressed: the question's tokens are then read behind the context,
    observed by the policy, and asked anew of what it kept."""

    @property
    def room(self) -> int:
        """Tokens of the longest of its questions with its answer."""
        return max(len(q.prompt) + q.answer_tokens for q in self.questions)


def exact(sample: Sample) -> Context:
    """A sample of token ids, whose answers are right or wrong as a whole."""

    def asked(question):
        def score(said: Tokens) -> float:
            return float(np.array_equal(said, question.answer))

        return Asked(question.prompt, len(question.answer), score, question.kind, expected=question.answer)

    return Context(sample.context, tuple(map(asked, sample.questions)))


def predicted(sample: Sample) -> Context:
    """A sample of plain text, which is given: the score is the share of its next tokens that the model says, and that
    of the full cache's next tokens once these are known (`agreeing`)."""

    def asked(question):
        answer = question.answer
        return Asked(question.prompt, len(answer), _agreement(answer), question.kind, given=answer)

    return Context(sample.context, tuple(map(asked, sample.questions)))


def agreeing(contexts: Sequence[Context], said: Sequence[Sequence[Tokens]]) -> list[Context]:
    """The contexts, each text that is given scored by the share of next tokens that are the same as in `said`: what
    the full cache said to each question of each context."""

    return [
        dataclasses.replace(context, questions=tuple(map(held_against, context.questions, own)))
        for context, own in zip(contexts, said, strict=True)
    ]


def held_against(question: Asked, said: Tokens) -> Asked:
    """A text that is given, scored by the share of next tokens that are those of `said`; any other question as it
    is."""
    return question if question.given is None else dataclasses.replace(question, score=_agreement(said))


def _agreement(reference: Tokens) -> Callable[[Tokens], float]:
    return lambda said: float(np.mean(said == reference))


def one_question(contexts: Sequence[Context]) -> list[Context]:
    """Each context with one of its questions, another for each."""
    return [
        dataclasses.replace(context, questions=(context.questions[index % len(context.questions)],))
        for index, context in enumerate(contexts)
    ]


def question_aware(contexts: Sequence[Context]) -> list[Context]:
    """Each question read with its context, and both compressed: question, chat template and answer prefix alike.

    The prompt's last token is the one that asks for the answer's first. It is observed like the others, taken out, and
    asked anew of what was kept: so what is compressed has seen the whole question, no token stands in the sequence
    twice, and the whole answer comes from what was kept. A policy that keeps everything answers as if it read on.
    """
    return [
        dataclasses.replace(
            context,
            tokens=np.concatenate([context.tokens, q.prompt[:-1]]),
            questions=(dataclasses.replace(q, prompt=as_tokens(q.prompt[-1:])),),
            known=True,
        )
        for context in contexts
        for q in context.questions
    ]
