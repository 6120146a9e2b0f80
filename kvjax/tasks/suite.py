"""Suites of tasks: a suite opens tasks for a model, and an opened task makes samples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from kvjax.errors import UserError
from kvjax.tasks.prompt import PromptEncoder
from kvjax.tasks.sample import Sample, Task
from kvjax.tasks.splits import Split

TURNS = "each", "golden", "own"
"""Ways to ask several questions about a context: each by itself, or after the earlier questions with their true answers
(golden) or the model's answers (own)."""
RIGHT = "answers right"
SAME_AS_FULL = "next tokens that are the full cache's, each after the true text before it"
HOLDS = "share of the expected strings that the answer holds"


@dataclass(frozen=True)
class Inputs:
    """Inputs of a task: the model's tokenizer, data files and prompt settings."""

    model: str
    """The source of the tokenizer: a model folder, a GGUF file, a hub id, or `builtin`."""
    data: Mapping[str, Path] = field(default_factory=dict)
    """Files, folders and hub datasets by their names in --data."""
    chat: bool = True
    """True if prompts go through the chat template, if there is one."""
    turns: str = TURNS[0]
    """One of `TURNS`."""
    tasks: Sequence[str] = ()
    """The names of all tasks that are opened."""

    @cached_property
    def tokenizer(self) -> Any:
        from kvjax.models.folder import load_tokenizer

        return load_tokenizer(self.model)

    @cached_property
    def encode(self) -> PromptEncoder:
        return PromptEncoder(self.tokenizer, self.chat)

    @property
    def is_builtin(self) -> bool:
        """True if the model has the built-in model's vocabulary."""
        from kvjax.models.folder import has_builtin_vocabulary

        return has_builtin_vocabulary(self.model)

    def path(self, name: str, description: str) -> Path:
        """Return the path of data that a task needs. Raises UserError, with the description, if it is missing."""
        if name not in self.data:
            raise UserError(f"a task needs --data {name}=PATH, {description}")
        return self.data[name]

    def count(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text."""
        return list(map(len, self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]))


@runtime_checkable
class Dataset(Protocol):
    """An opened task: samples of any length, some to compare on and others to calibrate on."""

    @property
    def metric(self) -> str:
        """Description of the score."""
        ...

    @property
    def published(self) -> bool:
        """True if the samples come from a published dataset, so that their number and order are fixed."""
        ...

    def answers(self, length: int) -> int:
        """Return the number of answers that a sample of a length counts for."""
        ...

    def samples(self, split: Split, count: int, length: int) -> list[Sample]:
        """Return the first samples of a split. Each has at most `length` tokens with any of its questions and answers.

        Raises UserError for an invalid length or file, or too few samples.
        """
        ...


@dataclass(frozen=True)
class Suite:
    """Tasks that are opened alike. `kvjax.tasks.registry` lists the suites."""

    tasks: tuple[str, ...]
    """The tasks' names."""
    open: Callable[[str, Inputs], Dataset]
    """Opens a task and its files by the task's name. Raises UserError, such as for a missing file, before any sample is
    made."""
    data: tuple[str, ...] = ()
    """Names of the data that the tasks read, from `--data NAME=PATH`."""
    is_contest: bool = False
    """True if the tasks are contests, whose problems have long sampled answers."""
    takes_turns: bool = False
    """True if the tasks use `--turns` for several questions about a context."""
    note: str = ""
    """A remark for reports on published samples, with the fields `{tasks}` and `{turns}`."""


@dataclass(frozen=True)
class FromSeeds:
    """Samples that are generated from seeds."""

    make: Callable[[int], Task]
    """Makes the task for a length."""
    metric: str
    """Description of the score."""
    published = False

    def answers(self, length: int) -> int:
        return len(self.make(length).sample(0, length).questions)

    def samples(self, split: Split, count: int, length: int) -> list[Sample]:
        task = self.make(length)
        return [task.sample(split.first + index, length) for index in range(count)]
