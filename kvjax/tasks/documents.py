"""Tasks on a user's documents: questions about passages, and passages of which the model predicts the end."""

from dataclasses import dataclass
from functools import cached_property

from kvjax.errors import UserError
from kvjax.tasks.document_questions import QUESTIONS, document_questions
from kvjax.tasks.passages import (
    CALIBRATION_SHARE,
    Document,
    paragraphs,
    passages,
    read_documents,
    sample_items,
    split_documents,
)
from kvjax.tasks.prompt import Example, PromptEncoder
from kvjax.tasks.sample import Sample
from kvjax.tasks.splits import Split
from kvjax.tasks.suite import HOLDS, SAME_AS_FULL, Inputs
from kvjax.tasks.text import ANSWERS_PER_TEXT, PARTS, continuation

DATA = "documents"
"""The name of the data in --data."""


@dataclass(frozen=True)
class Documents:
    """A user's documents, split into a part to compare on and a part to calibrate on."""

    inputs: Inputs
    """The documents' folder or file, and the tokenizer."""

    @cached_property
    def texts(self) -> list[str]:
        """The text of each document. Raises UserError if --data names none."""
        return read_documents(self.inputs.path(DATA, "a text file or a folder of .txt files"))

    @cached_property
    def _parts(self) -> tuple[list[Document], list[Document]]:
        return split_documents([paragraphs(text, self.inputs.count) for text in self.texts])

    def for_split(self, split: Split) -> list[Document]:
        """Return the documents that a split's contexts are cut from."""
        compared, calibration = self._parts
        return calibration if split.calibration else compared

    def describe(self, split: Split, items: str) -> str:
        """Return a description of `items` and of the split's share of the text, for errors."""
        use = (
            f"calibrate on (of {CALIBRATION_SHARE:.0%}"
            if split.calibration
            else f"compare (of {1 - CALIBRATION_SHARE:.0%}"
        )
        return f"--data {DATA} {self.inputs.data[DATA]}: {items} to {use} of the text)"


@dataclass(frozen=True)
class DocumentQuestions:
    """Questions about passages of documents."""

    documents: Documents
    metric = HOLDS
    published = False

    def answers(self, length: int) -> int:
        return QUESTIONS

    def samples(self, split: Split, count: int, length: int) -> list[Sample]:
        inputs = self.documents.inputs
        examples = document_questions(self.documents.for_split(split), inputs.encode, inputs.count, length)
        description = self.documents.describe(
            split, f"contexts of {length} tokens with {QUESTIONS} questions each"
        )
        return [inputs.encode(example) for example in sample_items(examples, split, count, description)]


@dataclass(frozen=True)
class DocumentText:
    """Passages of documents, of which the model predicts the end."""

    documents: Documents
    metric = SAME_AS_FULL
    published = False

    def answers(self, length: int) -> int:
        return ANSWERS_PER_TEXT

    def samples(self, split: Split, count: int, length: int) -> list[Sample]:
        encode = PromptEncoder(self.documents.inputs.tokenizer, chat=False)
        opening = len(encode(Example("", ())).context)
        if length - opening < 2 * PARTS:
            raise UserError(f"text: {length} tokens are too few, at least {opening + 2 * PARTS} are needed")
        candidates = passages(self.documents.for_split(split), length - opening)
        description = self.documents.describe(split, f"passages of {length} tokens")
        texts = sample_items(candidates, split, count, description)
        # a passage may be a few tokens longer than the sum of its paragraphs
        tokens = (encode(Example(text, ())).context[:length] for text in texts)
        return [continuation(ids) for ids in tokens]
