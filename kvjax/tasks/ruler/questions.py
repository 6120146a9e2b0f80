"""Question answering: a question's documents are shuffled with other documents of the same dataset."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int

from kvjax.tasks.prompt import Example, ExampleQuestion
from kvjax.tasks.ruler.writer import generator
from kvjax.tasks.splits import CALIBRATION_SEED, FIRST_SEED

RESERVED = 32
OPENING = "Below are numbered documents. You will be asked a question that some of them answer.\n\n"
QUESTION = "Question: {question}\nGive only the answer, in as few words as the documents above allow."
PREFIX = "\nAnswer:"
HEADING = "Document {number}:\n"


@dataclass(frozen=True)
class DataQuestion:
    """A question of a dataset, with its reference answers and the indices of its documents."""

    question: str
    """The question's text."""
    answers: tuple[str, ...]
    """Reference answers, each of which is right."""
    given: tuple[int, ...]
    """Documents that come with the question and are always in its context."""
    near: tuple[int, ...] = ()
    """Other documents of the same article."""


@dataclass(frozen=True)
class QuestionAnswering:
    """Questions about documents. The units are words of documents.

    The context has the question's documents, then near ones, then any others. Documents that are too long for the
    remaining units are skipped. Once the context has all documents, the other ones are repeated. Consecutive seeds ask
    different questions.
    """

    name: str
    documents: tuple[str, ...]
    """All documents of the dataset."""
    questions: tuple[DataQuestion, ...]
    """All questions of the dataset."""
    fewest = 1
    supply = None
    _words: Int[np.ndarray, " documents"] = field(init=False, repr=False)

    def __post_init__(self):
        words = [len(HEADING.split()) + len(document.split()) for document in self.documents]
        object.__setattr__(self, "_words", np.array(words))

    def write(self, seed: int, units: int) -> Example:
        rng = generator(self, seed)
        run, index = divmod(seed, FIRST_SEED)
        if index >= CALIBRATION_SEED:
            index = CALIBRATION_SEED - 1 - index  # from the end
        order = np.random.default_rng(run).permutation(len(self.questions))
        asked = self.questions[order[index % len(order)]]
        given, near = np.array(asked.given), rng.permutation(np.array(asked.near, int))
        anywhere = rng.permutation(len(self.documents))
        anywhere = anywhere[~np.isin(anywhere, np.concatenate([given, near]))]
        others = self._fit(np.concatenate([near, anywhere]), units - int(self._words[given].sum()))
        question = ExampleQuestion(
            QUESTION.format(question=asked.question), PREFIX, asked.answers, "any", RESERVED, self.name
        )
        return Example(OPENING + self._number(rng.permutation([*given, *others])), (question,))

    def _fit(self, order: Int[np.ndarray, " n"], capacity: int) -> list[int]:
        """Return the indices of documents with at most `capacity` words in total: all documents as often as they fit,
        then those that still fit, in order."""
        words = self._words[order]
        times, remaining = divmod(max(capacity, 0), max(words.sum(), 1))
        picks, index = order.tolist() * times, 0
        while (fits := words[index:] <= remaining).any():
            index += int(fits.argmax())
            picks.append(int(order[index]))
            remaining -= words[index]
            index += 1
        return picks

    def _number(self, picks: Sequence[int] | np.ndarray) -> str:
        parts = (HEADING.format(number=i) + self.documents[j] for i, j in enumerate(picks, 1))
        return "\n\n".join(parts) + "\n"
