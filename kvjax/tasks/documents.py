"""Tasks on a user's own documents: questions about passages of them, and passages whose end is predicted."""

from dataclasses import dataclass
from functools import cached_property

from kvjax.errors import UserError
from kvjax.tasks.document_questions import QUESTIONS, document_questions
from kvjax.tasks.passages import (
    CALIBRATION_SHARE,
    Document,
    draw,
    paragraphs,
    passages,
    read_documents,
    split_documents,
)
from kvjax.tasks.prompt import Example, PromptEncoder
from kvjax.tasks.sample import Sample
from kvjax.tasks.splits import Split
from kvjax.tasks.suite import HOLDS, SAME_AS_FULL, Inputs
from kvjax.tasks.text import COUNTS_FOR, PARTS, continuation

DATA = "documents"
"""The name of the data in --data."""


@dataclass(frozen=True)
class Documents:
    """The documents that are compared on and those that are calibrated on."""

    inputs: Inputs
    """Their folder or file, and the tokenizer."""

    @cached_property
    def texts(self) -> list[str]:
        """The text of each document. Raises UserError if --data names none."""
        return read_documents(self.inputs.path(DATA, "a text file or a folder of .txt files"))

    @cached_property
    def _parts(self) -> tuple[list[Document], list[Document]]:
        return split_documents([paragraphs(text, self.inputs.count) for text in self.texts])

    def of(self, split: Split) -> list[Document]:
        """Return the documents that a split's contexts are cut from."""
        compared, calibration = self._parts
        return calibration if split.calibration else compared

    def describe(self, split: Split, what: str) -> str:
        """Return a description of `what` and of the split's share of the text, for errors."""
        use = (
            f"calibrate on (of {CALIBRATION_SHARE:.0%}"
            if split.calibration
            else f"compare (of {1 - CALIBRATION_SHARE:.0%}"
        )
        return f"--data {DATA} {self.inputs.data[DATA]}: {what} to {use} of the text)"


@dataclass(frozen=True)
class DocumentQuestions:
    """Questions about passages of documents."""

    documents: Documents
    metric = HOLDS
    published = False

    def answers(self, length: int) -> int:
        return QUESTIONS

    def samples(self, split: Split, count: int, length: int) -> list[Sample]:
        own, inputs = self.documents, self.documents.inputs
        examples = document_questions(own.of(split), inputs.encode, inputs.count, length)
        of = own.describe(split, f"contexts of {length} tokens with {QUESTIONS} questions each")
        return [inputs.encode(example) for example in draw(examples, split.seed, count, of)]


@dataclass(frozen=True)
class DocumentText:
    """Passages of documents whose end is predicted."""

    documents: Documents
    metric = SAME_AS_FULL
    published = False

    def answers(self, length: int) -> int:
        return COUNTS_FOR

    def samples(self, split: Split, count: int, length: int) -> list[Sample]:
        own, encode = self.documents, PromptEncoder(self.documents.inputs.tokenizer, chat=False)
        room = length - len(encode(Example("", ())).context)
        if room < 2 * PARTS:
            raise UserError(
                f"text: {length} tokens are too few, at least {length - room + 2 * PARTS} are needed"
            )
        found = passages(own.of(split), room)
        texts = draw(found, split.seed, count, own.describe(split, f"passages of {length} tokens"))
        # a passage may be a few tokens longer than its paragraphs are
        tokens = (encode(Example(text, ())).context[:length] for text in texts)
        return [continuation(ids) for ids in tokens]
