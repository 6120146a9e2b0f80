"""Where samples come from, by the task's name: the built-in tasks, documents, RULER made here, RULER's own samples,
contests, LongBench, SCBench.

A source gives samples of a length: some to compare on, and others to calibrate on; one line in `SOURCES` adds a task.
"""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from kvjax.errors import UserError
from kvjax.models.folder import load_tokenizer, speaks_builtin
from kvjax.tasks import longbench, scbench
from kvjax.tasks.benchmark import BenchmarkSamples
from kvjax.tasks.builtin import builtin_task, builtin_text, builtin_vocabulary
from kvjax.tasks.contests import CONTESTS, ContestProblems
from kvjax.tasks.copy import Copy
from kvjax.tasks.document_questions import QUESTIONS, document_questions
from kvjax.tasks.needle import Needle
from kvjax.tasks.passages import (
    CALIBRATION_SHARE,
    Document,
    draw,
    paragraphs,
    passages,
    read_documents,
    split_documents,
)
from kvjax.tasks.prompt import Draft, PromptEncoder
from kvjax.tasks.recall import Recall
from kvjax.tasks.ruler import RULER_TASKS, Files, make_needle_task, make_ruler_task, published_drafts
from kvjax.tasks.sample import Sample, Task
from kvjax.tasks.splits import Split
from kvjax.tasks.text import PARTS, Text, continuation, split_text

TEXT_COUNTS_FOR = 12
"""Answers that a text counts for whose end is predicted."""
RIGHT = "answers right"
SAME_AS_FULL = "next tokens that are the full cache's, each after the true text before it"
HOLDS = "share of the expected strings that the answer holds"


@runtime_checkable
class Source(Protocol):
    """A task for a model."""

    @property
    def metric(self) -> str:
        """What its score is, in words."""
        ...

    @property
    def published(self) -> bool:
        """Whether its samples are a published data set's: so many of them, in their order, at some lengths."""
        ...

    def worth(self, length: int) -> int:
        """How many answers a sample of that length counts for."""
        ...

    def samples(self, split: Split, count: int, length: int) -> list[Sample]:
        """The first samples of a split, each of at most `length` tokens with any of its questions and answers.

        Raises UserError for a length or a file that does not do, or that has too few.
        """
        ...


@dataclass(frozen=True)
class Material:
    """What sources are made of: the model's name, and files."""

    model: str
    """Whose tokenizer it is."""
    files: Files
    """Of RULER's tasks."""
    ruler_data: Path | None
    """RULER's own samples; None: they are made here."""
    chat: bool
    """Whether prompts go through the chat template, if there is one."""
    documents: Path | None = None
    """A text file or a folder of them."""
    contests: Path | None = None
    """Problems of a contest; None: each contest's own data set on the hub."""
    longbench: Path | None = None
    """LongBench's files; None: its data set on the hub."""
    scbench: Path | None = None
    """SCBench's files; None: its data set on the hub."""
    turns: str = "each"
    """How SCBench's questions follow each other, one of its `TURNS`."""

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.model)

    @cached_property
    def encode(self) -> PromptEncoder:
        return PromptEncoder(self.tokenizer, self.chat)

    @cached_property
    def texts(self) -> list[str]:
        """The documents. Raises UserError if none are named."""
        if self.documents is None:
            raise UserError(
                "--tasks documents and text need --documents, a text file or a folder of .txt files"
            )
        return read_documents(self.documents)

    @cached_property
    def _parts(self) -> tuple[list[Document], list[Document]]:
        return split_documents([paragraphs(text, self.count) for text in self.texts])

    def documents_of(self, split: Split) -> list[Document]:
        """The documents that a split's contexts are cut from."""
        compared, calibration = self._parts
        return calibration if split.calibration else compared

    def describe(self, split: Split, what: str) -> str:
        """What is made of a split's documents, in words."""
        use = (
            f"calibrate on (of {CALIBRATION_SHARE:.0%}"
            if split.calibration
            else f"compare (of {1 - CALIBRATION_SHARE:.0%}"
        )
        return f"--documents {self.documents}: {what} to {use} of the text)"

    def count(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text."""
        return list(map(len, self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]))


@dataclass(frozen=True)
class FromSeeds:
    """A task whose samples are made here, each from a seed. `make`: the task for a length."""

    make: Callable[[int], Task]
    """The task for a length."""
    metric: str
    """What the score is, in words."""
    published: bool = False
    """Whether its samples are a published data set's."""

    def worth(self, length: int) -> int:
        return len(self.make(length).sample(0, length).questions)

    def samples(self, split: Split, count: int, length: int) -> list[Sample]:
        task = self.make(length)
        return [task.sample(split.first + index, length) for index in range(count)]


@dataclass(frozen=True)
class BuiltInText:
    """Slices of the packaged text, of which the end is predicted."""

    metric: str = SAME_AS_FULL
    """What the score is, in words."""
    published: bool = False
    """Whether its samples are a published data set's."""

    def worth(self, length: int) -> int:
        return TEXT_COUNTS_FOR

    def samples(self, split: Split, count: int, length: int) -> list[Sample]:
        compared, calibration = split_text(builtin_text("evaluate"))
        task = Text(builtin_vocabulary(), calibration if split.calibration else compared)
        return [task.sample(split.first + index, length) for index in range(count)]


@dataclass(frozen=True)
class PublishedSamples:
    """RULER's own samples of the task called `name`, in their order."""

    name: str
    """Of the task."""
    data: Path
    """A folder, or a hub data set."""
    material: Material
    """The tokenizer's."""
    metric: str = HOLDS
    """What the score is, in words."""
    published: bool = True
    """Whether its samples are a published data set's."""
    _read: dict[int, list[Draft]] = field(default_factory=dict, init=False, repr=False)

    def worth(self, length: int) -> int:
        return 1

    def samples(self, split: Split, count: int, length: int) -> list[Sample]:
        """The first samples are compared, those after them are calibrated on."""
        where = f"--ruler-data {self.data}"
        drafts = split.of_published(self._drafts(length), count, where, f"samples of {self.name}")
        samples = [self.material.encode(draft) for draft in drafts]
        sizes = [len(sample.context) + sample.room for sample in samples]
        for index, size in enumerate(sizes, split.compared if split.calibration else 0):
            if size > length:
                raise UserError(
                    f"--ruler-data {self.data}: sample {index} of {self.name} takes {size} tokens with its answer, "
                    f"--context is {length}"
                )
        if 2 * max(sizes) < length:
            raise UserError(
                f"--ruler-data {self.data}: the longest sample of {self.name} takes {max(sizes)} tokens with its "
                f"answer, less than half of --context {length}: name the length that they were made for"
            )
        return samples

    def _drafts(self, length: int) -> list[Draft]:
        """All of a length. Raises UserError for a second length of a folder, where a task has one file."""
        if length not in self._read:
            if self._read and self.data.is_dir():
                raise UserError(
                    f"--ruler-data {self.data}: a folder's samples have one length, got --context "
                    f"{', '.join(map(str, (*self._read, length)))}; evaluate a folder for each length"
                )
            self._read[length] = published_drafts(self.data, self.name, length)
        return self._read[length]


@dataclass(frozen=True)
class DocumentQuestions:
    """Questions about passages of documents."""

    material: Material
    """Documents and tokenizer."""
    metric: str = HOLDS
    """What the score is, in words."""
    published: bool = False
    """Whether its samples are a published data set's."""

    def worth(self, length: int) -> int:
        return QUESTIONS

    def samples(self, split: Split, count: int, length: int) -> list[Sample]:
        own, documents = self.material, self.material.documents_of(split)
        drafts = document_questions(documents, own.encode, own.count, length)
        of = own.describe(split, f"contexts of {length} tokens with {QUESTIONS} questions each")
        return [own.encode(draft) for draft in draw(drafts, split.seed, count, of)]


@dataclass(frozen=True)
class DocumentText:
    """Passages of documents, of which the end is predicted."""

    material: Material
    """Documents and tokenizer."""
    metric: str = SAME_AS_FULL
    """What the score is, in words."""
    published: bool = False
    """Whether its samples are a published data set's."""

    def worth(self, length: int) -> int:
        return TEXT_COUNTS_FOR

    def samples(self, split: Split, count: int, length: int) -> list[Sample]:
        own, encode = self.material, PromptEncoder(self.material.tokenizer, chat=False)
        room = length - len(encode(Draft("", ())).context)
        if room < 2 * PARTS:
            raise UserError(
                f"text: {length} tokens are too few, at least {length - room + 2 * PARTS} are needed"
            )
        found = passages(own.documents_of(split), room)
        texts = draw(found, split.seed, count, own.describe(split, f"passages of {length} tokens"))
        # a passage may be a few tokens longer than its paragraphs are
        tokens = (encode(Draft(text, ())).context[:length] for text in texts)
        return [continuation(ids) for ids in tokens]


def _builtin(name: str, make: Callable[[int], Task]) -> Callable[[Material], Source]:
    def for_model(material: Material) -> Source:
        if not speaks_builtin(material.model):
            raise UserError(
                f"--tasks {name} is made of the built-in model's tokens, which {material.model} does not have; for any "
                f"model: needle, documents, text, {', '.join(RULER_TASKS)}"
            )
        return FromSeeds(make, RIGHT)

    return for_model


def _ruler(name: str) -> Callable[[Material], Source]:
    def for_model(material: Material) -> Source:
        if material.ruler_data is not None:
            return PublishedSamples(name, material.ruler_data, material)
        task = make_ruler_task(name, material.tokenizer, material.files, chat=material.chat)
        return FromSeeds(lambda length: task, HOLDS)

    return for_model


def _needle(material: Material) -> Source:
    """In the built-in model's tokens for it, in text for others."""
    if speaks_builtin(material.model):
        return FromSeeds(lambda length: builtin_task(Needle), RIGHT)
    task = make_needle_task(material.tokenizer, material.files, chat=material.chat)
    return FromSeeds(lambda length: task, HOLDS)


def _documents(material: Material) -> Source:
    _ = material.texts  # read now
    return DocumentQuestions(material)


def _text(material: Material) -> Source:
    """Of documents where they are named or the model is not the built-in one."""
    if material.documents is None and speaks_builtin(material.model):
        return BuiltInText()
    _ = material.texts  # read now
    return DocumentText(material)


def _copy(length: int) -> Task:
    """As many families of passages as the model has seen at that length, a question each."""
    return Copy(builtin_vocabulary(), builtin_text("evaluate"), families=max(1, length // 256))


def _contest(name: str) -> Callable[[Material], Source]:
    def for_model(material: Material) -> Source:
        own = ContestProblems(name, material.contests, material.tokenizer, material.chat)
        _ = own.problems  # read now
        return own

    return for_model


def _longbench(name: str) -> Callable[[Material], Source]:
    def for_model(material: Material) -> Source:
        drafts = longbench.longbench_drafts(name, material.longbench)
        where = f"{longbench.OPTION} {material.longbench or 'on the hub'}"
        metric = longbench.longbench_task(name).metric.name
        return BenchmarkSamples(name, where, drafts, material.encode, metric)

    return for_model


def _scbench(name: str) -> Callable[[Material], Source]:
    def for_model(material: Material) -> Source:
        drafts = scbench.scbench_drafts(name, material.scbench, material.turns, material.encode)
        where = f"{scbench.OPTION} {material.scbench or 'on the hub'}"
        return BenchmarkSamples(name, where, drafts, material.encode, scbench.TASKS[name].metric)

    return for_model


SOURCES: dict[str, Callable[[Material], Source]] = {
    "recall": _builtin("recall", lambda length: builtin_task(Recall)),
    "needle": _needle,
    "copy": _builtin("copy", _copy),
    "text": _text,
    "documents": _documents,
    **{name: _ruler(name) for name in RULER_TASKS},
    **{name: _contest(name) for name in CONTESTS},
    **{f"longbench_{name}": _longbench(name) for name in longbench.NAMES},
    **{name: _scbench(name) for name in scbench.TASKS},
}


def source(name: str, material: Material) -> Source:
    """The task called `name`, its files opened, so that a missing one is found before any sample is made.

    Raises UserError with the nearest names, for a task that is not for the model, or for a file.
    """
    if name not in SOURCES:
        near = difflib.get_close_matches(name, SOURCES) or list(SOURCES)
        raise UserError(f"--tasks: unknown task {name!r}; the nearest known: {', '.join(near)}")
    return SOURCES[name](material)


def check_separable(name: str, samples: Sequence[Sample]) -> None:
    """Refuse samples whose contexts cannot be read before their questions. Raises UserError."""
    if any(not sample.separable for sample in samples):
        raise UserError(
            f"--tasks {name}: its samples hold context and question in one, so the context cannot be read first; use "
            "--question-aware"
        )
