"""HELMET's records as prompts: their files, and the parts of a prompt."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvjax.errors import UserError
from kvjax.tasks.datasets import Row, file_rows, folder_rows, hub_file
from kvjax.tasks.prompt import Example, ExampleQuestion, Scoring

DATA = "helmet"
"""The name of its data in --data."""
OPTION = f"--data {DATA}"
LENGTHS = 4096, 8192, 16384, 32768, 65536, 131072
"""Tokens that the published files are made for."""


@dataclass(frozen=True)
class Files:
    """HELMET's data, for one length."""

    folder: Path | None
    """The unpacked data.tar.gz, with copies of the hub's datasets; None if there is none."""
    size: int
    """The length's index in `LENGTHS`."""

    def rows(self, file: str) -> list[Row]:
        """Return a published file's records. Raises UserError if there is no folder."""
        if self.folder is None:
            raise UserError(f"a task needs {OPTION}=PATH, the unpacked data.tar.gz of princeton-nlp/HELMET")
        return list(file_rows(self.folder / file, OPTION))

    def hub_rows(self, name: str, split: str, file: str, revision: str | None = None) -> list[Row]:
        """Return the rows of a split. They come from SPLIT.jsonl, SPLIT.parquet or a folder SPLIT in the data's folder
        of the dataset's name, or from the dataset's file on the hub."""
        own = self.folder and self.folder / name.split("/")[1]
        if own and own.is_dir():
            return list(folder_rows(own, split, OPTION))
        return list(file_rows(hub_file(name, file, OPTION, revision), OPTION))


@dataclass(frozen=True)
class Prompt:
    """A record as a prompt. If it is too long, its documents lose their end."""

    before: str
    documents: str
    after: str
    """The rest of the context."""
    question: str
    prefix: str
    """The white space before the answer, and the words that begin it."""
    expected: tuple[str, ...]
    scoring: Scoring
    """Scores the answer with the words that begin it."""
    chat: bool = False
    """True if the model's chat template is used, if it has one. The words that begin the answer are then left out."""
    omitted: str = ""
    """The text after documents that were cut."""

    def example(self, documents: str, name: str, reserved: int, chat: bool) -> Example:
        """Return the prompt with these documents, for a model with or without a chat template."""
        prefix = "" if self.chat and chat else self.prefix
        said = prefix.lstrip()
        question = ExampleQuestion(
            self.question,
            prefix,
            self.expected,
            lambda answer, expected: self.scoring(said + answer, expected),
            reserved,
            name,
        )
        return Example(self.before + documents + self.after, (question,), as_is=not self.chat)


Prompts = list[Callable[[], Prompt]]
"""Functions that make a task's prompts. Those that the official run evaluates come first."""
