"""Where contexts come from, by the task's name: the built-in tasks, RULER made here, RULER's own samples.

A source gives contexts of a length from a seed; one line in `SOURCES` adds a task.
"""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from kvjax.errors import UserError
from kvjax.evaluate.asked import Asked, Context, exact, predicted
from kvjax.evaluate.tasks import PromptEncoder, TextSample, make_task
from kvjax.evaluate.tasks.ruler import RULER_TASKS, Files, make_ruler_task, published_samples
from kvjax.evaluate.tasks.task import Sample, Tokens
from kvjax.evaluate.tasks.text_prompt import prompt_size
from kvjax.models.folder import load_tokenizer, speaks_builtin

TEXT_COUNTS_FOR = 12
"""Answers that a predicted text counts for."""


class Source(Protocol):
    """A task for a model."""

    @property
    def metric(self) -> str:
        """What its score is, in words."""
        ...

    def contexts(self, first: int, answers: int, length: int) -> list[Context]:
        """Contexts of the seeds from `first` on, with at least so many answers, each of at most `length` tokens with
        any of its questions and answers. Raises UserError for a length or a file that does not do."""
        ...


@dataclass(frozen=True)
class Material:
    """What sources are made of: the model's name, and files."""

    model: str
    files: Files
    ruler_data: Path | None
    chat: bool

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.model)

    @cached_property
    def encode(self) -> PromptEncoder:
        return PromptEncoder(self.tokenizer, self.chat)


@dataclass(frozen=True)
class BuiltIn:
    """A task of the built-in vocabulary's token ids."""

    name: str
    metric: str
    asked: Callable[[Sample], Context] = exact
    counts_for: int | None = None
    """Answers that a context counts for; None: as many as it has questions."""

    def contexts(self, first: int, answers: int, length: int) -> list[Context]:
        task = make_task(self.name)
        sample = task.sample(first, length)
        count = -(-answers // (self.counts_for or len(sample.questions)))
        return [self.asked(task.sample(first + index, length)) for index in range(count)]


@dataclass(frozen=True)
class Ruler:
    """One of RULER's tasks, in text that is made here."""

    name: str
    material: Material
    metric: str = "share of the expected strings that the answer holds"

    def contexts(self, first: int, answers: int, length: int) -> list[Context]:
        task = make_ruler_task(
            self.name, self.material.tokenizer, self.material.files, chat=self.material.chat
        )
        samples = [task.sample(first + index, length) for index in range(answers)]
        return [_encoded(sample, self.material) for sample in samples]


@dataclass(frozen=True)
class PublishedRuler:
    """RULER's own samples of a task, in their order."""

    name: str
    material: Material
    metric: str = "share of the expected strings that the answer holds"

    def contexts(self, first: int, answers: int, length: int) -> list[Context]:
        assert self.material.ruler_data is not None
        file = self.material.ruler_data / f"{self.name}.jsonl"
        samples = published_samples(file, self.name)[:answers]
        for index, sample in enumerate(samples):
            if (size := prompt_size(sample, self.material.encode)) > length:
                raise UserError(
                    f"{file}: sample {index} takes {size} tokens with its answer, --context is {length}"
                )
        return [_encoded(sample, self.material) for sample in samples]


def _encoded(sample: TextSample, material: Material) -> Context:
    prompt = material.encode(sample)
    asked = []
    for ids, question in zip(prompt.questions, sample.questions, strict=True):

        def score(said: Tokens, question=question) -> float:
            return question.score(material.tokenizer.decode(said.tolist(), skip_special_tokens=True))

        asked.append(Asked(ids, question.reserved, score, question.kind, stops=True))
    return Context(prompt.context, tuple(asked), sample.published, sample.separable)


def _builtin(name: str, *args: Any) -> Callable[[Material], Source]:
    def make(material: Material) -> Source:
        if not speaks_builtin(material.model):
            raise UserError(
                f"--tasks {name} is made of the built-in model's tokens, which {material.model} does not have; for any "
                f"model: {', '.join(RULER_TASKS)}"
            )
        return BuiltIn(name, *args)

    return make


def _ruler(name: str) -> Callable[[Material], Source]:
    def make(material: Material) -> Source:
        return Ruler(name, material) if material.ruler_data is None else PublishedRuler(name, material)

    return make


SOURCES: dict[str, Callable[[Material], Source]] = {
    "recall": _builtin("recall", "answers right"),
    "needle": _builtin("needle", "answers right"),
    "copy": _builtin("copy", "answers right"),
    "text": _builtin(
        "text", "next tokens right, each after the true text before it", predicted, TEXT_COUNTS_FOR
    ),
    **{name: _ruler(name) for name in RULER_TASKS},
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
