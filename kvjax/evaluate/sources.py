"""Where contexts come from, by the task's name: the built-in tasks, documents, RULER made here, RULER's own samples.

A source gives contexts of a length from a seed; one line in `SOURCES` adds a task.
"""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from kvjax.errors import UserError
from kvjax.evaluate.asked import Asked, Context, exact, predicted
from kvjax.evaluate.tasks import (
    Copy,
    PromptEncoder,
    Task,
    TextSample,
    builtin_text,
    builtin_vocabulary,
    make_task,
)
from kvjax.evaluate.tasks.document_questions import QUESTIONS, document_questions
from kvjax.evaluate.tasks.documents import chosen, passages, read_documents
from kvjax.evaluate.tasks.ruler import (
    RULER_TASKS,
    Files,
    RulerTask,
    make_needle_task,
    make_ruler_task,
    published_samples,
)
from kvjax.evaluate.tasks.task import Sample, Tokens
from kvjax.evaluate.tasks.text import continued
from kvjax.evaluate.tasks.text_prompt import prompt_size
from kvjax.models.folder import load_tokenizer, speaks_builtin

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

    def worth(self, length: int) -> int:
        """How many answers a context of that length counts for."""
        ...

    def contexts(self, first: int, count: int, length: int) -> list[Context]:
        """Contexts of the seeds from `first` on, each of at most `length` tokens with any of its questions and answers.

        Raises UserError for a length or a file that does not do.
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
    def read(self) -> list[str]:
        """The documents. Raises UserError if none are named."""
        if self.documents is None:
            raise UserError(
                "--tasks documents and text need --documents, a text file or a folder of .txt files"
            )
        return read_documents(self.documents)

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
        return Context(prompt.context, tuple(questions), sample.published, sample.separable)


@dataclass(frozen=True)
class BuiltIn:
    """A task of the built-in vocabulary's token ids. `make`: the task for a length."""

    make: Callable[[int], Task]
    metric: str = "answers right"
    asked: Callable[[Sample], Context] = exact
    counts_for: int | None = None

    def worth(self, length: int) -> int:
        return self.counts_for or len(self.make(length).sample(0, length).questions)

    def contexts(self, first: int, count: int, length: int) -> list[Context]:
        task = self.make(length)
        return [self.asked(task.sample(first + index, length)) for index in range(count)]


@dataclass(frozen=True)
class InText:
    """One of RULER's tasks, or a needle by depth: in text that is made here or, with `ruler_data`, RULER's own samples
    in their order."""

    name: str
    material: Material
    metric: str = HOLDS

    def worth(self, length: int) -> int:
        return 1

    def contexts(self, first: int, count: int, length: int) -> list[Context]:
        if self.material.ruler_data is not None and self.name in RULER_TASKS:
            return [self.material.encoded(sample) for sample in self._published(count, length)]
        task = self._task()
        return [self.material.encoded(task.sample(first + index, length)) for index in range(count)]

    def _task(self) -> RulerTask:
        tokenizer, files, chat = self.material.tokenizer, self.material.files, self.material.chat
        if self.name in RULER_TASKS:
            return make_ruler_task(self.name, tokenizer, files, chat=chat)
        return make_needle_task(tokenizer, files, chat=chat)

    def _published(self, count: int, length: int) -> list[TextSample]:
        assert self.material.ruler_data is not None
        data = self.material.ruler_data
        samples = published_samples(data, self.name, length)[:count]
        for index, sample in enumerate(samples):
            if (size := prompt_size(sample, self.material.encode)) > length:
                raise UserError(
                    f"--ruler-data {data}: sample {index} of {self.name} takes {size} tokens with its answer, "
                    f"--context is {length}"
                )
        return samples


@dataclass(frozen=True)
class AboutDocuments:
    """Questions about passages of documents; those of each length are made once."""

    material: Material
    metric: str = HOLDS
    _made: dict[int, list[TextSample]] = field(default_factory=dict)

    def worth(self, length: int) -> int:
        return QUESTIONS

    def contexts(self, first: int, count: int, length: int) -> list[Context]:
        own = self.material
        if length not in self._made:
            self._made[length] = document_questions(own.read, own.encode, own.count, length)
        made_of = f"--documents {own.documents}: contexts of {length} tokens with {QUESTIONS} questions each"
        return [own.encoded(sample) for sample in chosen(self._made[length], first, count, made_of)]


@dataclass(frozen=True)
class GoingOn:
    """Passages of documents, of which the end is predicted."""

    material: Material
    metric: str = SAME_AS_FULL

    def worth(self, length: int) -> int:
        return TEXT_COUNTS_FOR

    def contexts(self, first: int, count: int, length: int) -> list[Context]:
        own, encode = self.material, PromptEncoder(self.material.tokenizer, chat=False)
        opening = len(encode(TextSample("", ())).context)
        found = passages(own.read, own.count, length - opening)
        texts = chosen(found, first, count, f"--documents {own.documents}: passages of {length} tokens")
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


def _needle(material: Material) -> Source:
    """In the built-in model's tokens for it, in text for others."""
    return (_builtin("needle") if speaks_builtin(material.model) else partial(InText, "needle"))(material)


def _text(material: Material) -> Source:
    """Of documents where they are named or the model is not the built-in one."""
    if material.documents is not None or not speaks_builtin(material.model):
        return GoingOn(material)
    return BuiltIn(lambda length: make_task("text"), SAME_AS_FULL, predicted, TEXT_COUNTS_FOR)


def _copy(length: int) -> Task:
    """As many families of passages as the model has seen at that length, a question each."""
    return Copy(builtin_vocabulary(), builtin_text("evaluate"), families=max(1, length // 256))


SOURCES: dict[str, Callable[[Material], Source]] = {
    "recall": _builtin("recall"),
    "needle": _needle,
    "copy": _builtin("copy", make=_copy),
    "text": _text,
    "documents": AboutDocuments,
    **{name: partial(InText, name) for name in RULER_TASKS},
}


def source(name: str, material: Material) -> Source:
    """The task called `name`. Raises UserError with the nearest names, or for a task that is not for the model."""
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
