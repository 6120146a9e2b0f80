"""Where contexts come from, by the task's name: the built-in tasks, documents, RULER made here, RULER's own samples.

A source gives contexts of a length: some to compare on, and others to calibrate on; one line in `SOURCES` adds a task.
"""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from kvjax.errors import UserError
from kvjax.models.folder import load_tokenizer, speaks_builtin
from kvjax.tasks import (
    Copy,
    PromptEncoder,
    Task,
    Text,
    TextSample,
    builtin_text,
    builtin_vocabulary,
    make_task,
)
from kvjax.tasks.context import Asked, Context, exact, predicted
from kvjax.tasks.document_questions import QUESTIONS, document_questions
from kvjax.tasks.documents import (
    CALIBRATION,
    Document,
    apart,
    chosen,
    paragraphs,
    passages,
    read_documents,
)
from kvjax.tasks.ruler import (
    RULER_TASKS,
    Files,
    RulerTask,
    make_needle_task,
    make_ruler_task,
    published_samples,
)
from kvjax.tasks.splits import Split
from kvjax.tasks.task import Tokens
from kvjax.tasks.text import SHARE, continued, cut_apart
from kvjax.tasks.text_prompt import prompt_size

TEXT_COUNTS_FOR = 12
"""Answers that a predicted text counts for."""
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
        """Whether its contexts are a published data set's: so many of them, in their order, at some lengths."""
        ...

    def worth(self, length: int) -> int:
        """How many answers a context of that length counts for."""
        ...

    def contexts(self, split: Split, count: int, length: int) -> list[Context]:
        """The first contexts of a split, each of at most `length` tokens with any of its questions and answers.

        Raises UserError for a length or a file that does not do, or that has too few.
        """
        ...


@dataclass(frozen=True)
class Material:
    """What sources are made of: the model's name, and files."""

    model: str
    files: Files
    ruler_data: Path | None
    chat: bool
    documents: Path | None = None

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
    def _apart(self) -> tuple[list[Document], list[Document]]:
        return apart([paragraphs(text, self.count) for text in self.texts])

    def documents_of(self, split: Split) -> list[Document]:
        """The documents that a split's contexts are cut from."""
        compared, calibration = self._apart
        return calibration if split.calibration else compared

    def made_of(self, split: Split, what: str) -> str:
        """What is made of a split's documents, in words."""
        use = (
            f"calibrate on (of {CALIBRATION:.0%}"
            if split.calibration
            else f"compare (of {1 - CALIBRATION:.0%}"
        )
        return f"--documents {self.documents}: {what} to {use} of the text)"

    def count(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text."""
        return list(map(len, self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]))

    def encoded(self, sample: TextSample) -> Context:
        """A sample as token ids, its answers scored as text."""
        prompt, tokenizer = self.encode(sample), self.tokenizer

        def asked(ids, answer, question):
            def score(said: Tokens) -> float:
                return question.score(tokenizer.decode(said.tolist(), skip_special_tokens=True))

            return Asked(ids, question.reserved, score, question.kind, stops=True, expected=answer)

        questions = map(asked, prompt.questions, prompt.answers, sample.questions)
        return Context(prompt.context, tuple(questions), sample.separable)


@dataclass(frozen=True)
class BuiltIn:
    """A task of the built-in vocabulary's token ids. `make`: the task for a length."""

    make: Callable[[int], Task]
    metric: str = "answers right"
    published: bool = False

    def worth(self, length: int) -> int:
        return len(self.make(length).sample(0, length).questions)

    def contexts(self, split: Split, count: int, length: int) -> list[Context]:
        task = self.make(length)
        return [exact(task.sample(split.first + index, length)) for index in range(count)]


@dataclass(frozen=True)
class BuiltInText:
    """Slices of the packaged text, of which the end is predicted."""

    metric: str = SAME_AS_FULL
    published: bool = False

    def worth(self, length: int) -> int:
        return TEXT_COUNTS_FOR

    def contexts(self, split: Split, count: int, length: int) -> list[Context]:
        compared, calibration = cut_apart(builtin_text("evaluate"))
        task = Text(builtin_vocabulary(), calibration if split.calibration else compared)
        return [predicted(task.sample(split.first + index, length)) for index in range(count)]


@dataclass(frozen=True)
class InText:
    """One of RULER's tasks, or a needle by depth, in text that is made here."""

    task: RulerTask
    material: Material
    metric: str = HOLDS
    published: bool = False

    def worth(self, length: int) -> int:
        return 1

    def contexts(self, split: Split, count: int, length: int) -> list[Context]:
        samples = (self.task.sample(split.first + index, length) for index in range(count))
        return list(map(self.material.encoded, samples))


@dataclass(frozen=True)
class Published:
    """RULER's own samples of the task called `name`, in their order."""

    name: str
    data: Path
    material: Material
    metric: str = HOLDS
    published: bool = True
    _read: dict[int, list[TextSample]] = field(default_factory=dict, init=False, repr=False)

    def worth(self, length: int) -> int:
        return 1

    def contexts(self, split: Split, count: int, length: int) -> list[Context]:
        """The first samples are compared, those after them are calibrated on."""
        first, samples = split.compared if split.calibration else 0, self._samples(length)
        if first + count > len(samples):
            after = f" and {count} more to calibrate on" if split.calibration else ""
            raise UserError(
                f"--ruler-data {self.data}: there are {len(samples)} samples of {self.name}, needed {split.compared} "
                f"to compare{after}; give fewer --samples"
            )
        samples = samples[first : first + count]
        sizes = [prompt_size(sample, self.material.encode) for sample in samples]
        for index, size in enumerate(sizes, first):
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
        return list(map(self.material.encoded, samples))

    def _samples(self, length: int) -> list[TextSample]:
        """All of a length. Raises UserError for a second length of a folder, where a task has one file."""
        if length not in self._read:
            if self._read and self.data.is_dir():
                raise UserError(
                    f"--ruler-data {self.data}: a folder's samples have one length, got --context "
                    f"{', '.join(map(str, (*self._read, length)))}; evaluate a folder for each length"
                )
            self._read[length] = published_samples(self.data, self.name, length)
        return self._read[length]


@dataclass(frozen=True)
class DocumentQuestions:
    """Questions about passages of documents."""

    material: Material
    metric: str = HOLDS
    published: bool = False

    def worth(self, length: int) -> int:
        return QUESTIONS

    def contexts(self, split: Split, count: int, length: int) -> list[Context]:
        own, documents = self.material, self.material.documents_of(split)
        samples = document_questions(documents, own.encode, own.count, length)
        made_of = own.made_of(split, f"contexts of {length} tokens with {QUESTIONS} questions each")
        return [own.encoded(sample) for sample in chosen(samples, split.seed, count, made_of)]


@dataclass(frozen=True)
class DocumentText:
    """Passages of documents, of which the end is predicted."""

    material: Material
    metric: str = SAME_AS_FULL
    published: bool = False

    def worth(self, length: int) -> int:
        return TEXT_COUNTS_FOR

    def contexts(self, split: Split, count: int, length: int) -> list[Context]:
        own, encode = self.material, PromptEncoder(self.material.tokenizer, chat=False)
        room = length - len(encode(TextSample("", ())).context)
        if room < 2 * SHARE:
            raise UserError(
                f"text: {length} tokens are too few, at least {length - room + 2 * SHARE} are needed"
            )
        found = passages(own.documents_of(split), room)
        texts = chosen(found, split.seed, count, own.made_of(split, f"passages of {length} tokens"))
        # a passage may be a few tokens longer than its paragraphs are
        tokens = (encode(TextSample(text, ())).context[:length] for text in texts)
        return [predicted(continued(ids)) for ids in tokens]


def _builtin(name: str, make: Callable[[int], Task] | None = None) -> Callable[[Material], Source]:
    def for_model(material: Material) -> Source:
        if not speaks_builtin(material.model):
            raise UserError(
                f"--tasks {name} is made of the built-in model's tokens, which {material.model} does not have; for any "
                f"model: needle, documents, text, {', '.join(RULER_TASKS)}"
            )
        return BuiltIn(make or (lambda length: make_task(name)))

    return for_model


def _in_text(name: str) -> Callable[[Material], Source]:
    def for_model(material: Material) -> Source:
        if material.ruler_data is not None:
            return Published(name, material.ruler_data, material)
        task = make_ruler_task(name, material.tokenizer, material.files, chat=material.chat)
        return InText(task, material)

    return for_model


def _needle(material: Material) -> Source:
    """In the built-in model's tokens for it, in text for others."""
    if speaks_builtin(material.model):
        return _builtin("needle")(material)
    return InText(make_needle_task(material.tokenizer, material.files, chat=material.chat), material)


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


SOURCES: dict[str, Callable[[Material], Source]] = {
    "recall": _builtin("recall"),
    "needle": _needle,
    "copy": _builtin("copy", make=_copy),
    "text": _text,
    "documents": _documents,
    **{name: _in_text(name) for name in RULER_TASKS},
}


def source(name: str, material: Material) -> Source:
    """The task called `name`, its files opened, so that a missing one is found before any context is made.

    Raises UserError with the nearest names, for a task that is not for the model, or for a file.
    """
    if name not in SOURCES:
        near = difflib.get_close_matches(name, SOURCES) or list(SOURCES)
        raise UserError(f"--tasks: unknown task {name!r}; the nearest known: {', '.join(near)}")
    return SOURCES[name](material)


def check_separable(name: str, contexts: Sequence[Context]) -> None:
    """Refuse contexts that cannot be read before their questions. Raises UserError."""
    if any(not context.separable for context in contexts):
        raise UserError(
            f"--tasks {name}: its samples hold context and question in one, so the context cannot be read first; use "
            "--question-aware"
        )
