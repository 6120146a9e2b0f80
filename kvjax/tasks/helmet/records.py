"""HELMET's data files, and the parts of a prompt."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path

from kvjax.errors import UserError
from kvjax.tasks.datasets import Row, file_rows, folder_rows, hub_file
from kvjax.tasks.prompt import Example, ExampleQuestion, Scoring

DATA = "helmet"
"""The name of its data in --data."""
OPTION = f"--data {DATA}"
LENGTHS = 4096, 8192, 16384, 32768, 65536, 131072
"""The lengths in tokens for which there are published files."""


@dataclass(frozen=True)
class Files:
    """HELMET's data, for one length."""

    folder: Path | None
    """The unpacked data.tar.gz, possibly with copies of hub datasets; None if there is none."""
    length_index: int
    """The length's index in `LENGTHS`."""

    def rows(self, file: str) -> list[Row]:
        """Return a published file's records. Raises UserError if there is no folder."""
        if self.folder is None:
            raise UserError(f"a task needs {OPTION}=PATH, the unpacked data.tar.gz of princeton-nlp/HELMET")
        return list(file_rows(self.folder / file, OPTION))

    def hub_rows(self, name: str, split: str, file: str, revision: str | None = None) -> list[Row]:
        """Return the rows of a split.

        They come from SPLIT.jsonl, SPLIT.parquet or a folder SPLIT in a local folder with the dataset's name, or else
        from a file of the dataset on the hub.
        """
        local = self.folder and self.folder / name.split("/")[1]
        if local and local.is_dir():
            return list(folder_rows(local, split, OPTION))
        return list(file_rows(hub_file(name, file, OPTION, revision), OPTION))


@dataclass(frozen=True)
class Prompt:
    """A record as a prompt. Its context is `before + documents + after`; only the documents may be cut."""

    before: str
    documents: str
    after: str
    question: str
    prefix: str
    """The white space before the answer, and the given words that begin it."""
    expected: tuple[str, ...]
    scoring: Scoring
    """Scores the answer together with the words that begin it."""
    chat: bool = False
    """True if a chat template is used, if the model has one. The words that begin the answer are then left out."""
    omitted: str = ""
    """The text after documents that were cut."""

    def example(self, documents: str, name: str, reserved: int, chat: bool) -> Example:
        """Return the prompt with these documents. `chat`: True if the model has a chat template."""
        prefix = "" if self.chat and chat else self.prefix
        beginning = prefix.lstrip()
        question = ExampleQuestion(
            self.question,
            prefix,
            self.expected,
            lambda answer, expected: self.scoring(beginning + answer, expected),
            reserved,
            name,
        )
        return Example(self.before + documents + self.after, (question,), as_is=not self.chat)


Prompts = list[tuple[Hashable, list[Callable[[], Prompt]]]]
"""The questions of a task, with those of the official run first. Each has the text or the novel that it is about, which
others may share, and functions that make its prompts. These differ in the order of the passages."""
