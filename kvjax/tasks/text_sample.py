"""Tasks that are text in and text out, for real models: what a sample is and how an answer is scored.

Unlike `task.Sample`, a sample here knows no tokenizer: `text_prompt` makes token ids of it, with or without a chat
template. The context stands apart from the questions, so that it can be compressed before a question is known.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvjax.errors import UserError


def all_found(answer: str, expected: Sequence[str]) -> float:
    """The share of the expected strings that occur in the answer, whatever their case."""
    return sum(wanted.lower() in answer.lower() for wanted in expected) / len(expected)


def any_found(answer: str, expected: Sequence[str]) -> float:
    """1 if one of the expected strings occurs in the answer, whatever its case; else 0."""
    return float(any(wanted.lower() in answer.lower() for wanted in expected))


SCORES: dict[str, Callable[[str, Sequence[str]], float]] = {"all": all_found, "any": any_found}
"""How an answer is scored, by name: from 0 to 1, given the answer and the expected strings."""


@dataclass(frozen=True)
class TextQuestion:
    """A question about a context, and what is expected."""

    text: str
    """It follows the context directly."""
    answer_prefix: str
    """How the answer begins, given to the model. It starts with the white space that parts it from the question, and
    ends without."""
    expected: tuple[str, ...]
    """The strings that `scoring` looks for."""
    scoring: str
    """A name in `SCORES`."""
    reserved: int
    """How many tokens the answer may have."""
    kind: str
    """The row that it is reported under."""

    def score(self, answer: str) -> float:
        """From 0 to 1, for the text that the model wrote after the prefix."""
        return SCORES[self.scoring](answer, self.expected)


@dataclass(frozen=True)
class TextSample:
    """A context and its questions. Each question is asked on its own, directly after the context.

    The context ends with the line break before the question. `published`: the text is a published data set's, not
    generated here; a table that mixes both must say so. `templated`: the text has a model's chat template already.
    """

    context: str
    questions: tuple[TextQuestion, ...]
    published: bool = False
    templated: bool = False

    @property
    def separable(self) -> bool:
        """Whether the context can be read before the question is known."""
        return self.context != ""


def mean_score(questions: Sequence[TextQuestion], answers: Sequence[str]) -> float:
    """The mean of the answers' scores × 100, as benchmarks report it.

    Raises `UserError` if there is none, or not one answer for each question.
    """
    if not questions or len(questions) != len(answers):
        raise UserError(f"one answer for each question is needed, got {len(answers)} for {len(questions)}")
    return 100 * sum(q.score(a) for q, a in zip(questions, answers, strict=True)) / len(questions)
