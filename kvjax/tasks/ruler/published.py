"""RULER's own samples as examples. The rows of files or of a hub dataset have one of two forms.

RULER's programs write `input`, `outputs` and sometimes `answer_prefix`. `input` has context and question. It is cut
before the question, which is at the end, on a line that starts with one of `QUESTION_STARTS`. Without such a line the
example's context is empty, the whole input is its question, and it can only be evaluated question-aware. Without
`answer_prefix`, the question ends with the beginning of the answer.

The dataset that NVIDIA kvpress reads from the hub has `context`, `question`, `answer` and sometimes `answer_prefix` and
`max_new_tokens` (of the answer).

The text may have a model's chat template already, if it begins with a match of `TEMPLATE_START`; no task does. Such an
example is `as_is`.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvjax.errors import UserError, whole_number
from kvjax.tasks.datasets import Row, file_rows, hub_splits, is_hub_name, row_text, row_texts, table_files
from kvjax.tasks.prompt import Example, ExampleQuestion, PromptEncoder
from kvjax.tasks.sample import Sample
from kvjax.tasks.splits import Split
from kvjax.tasks.suite import HOLDS

DATA = "ruler"
"""The name of the data in --data."""
OPTION = f"--data {DATA}"

QUESTION_STARTS = ("Question:", "What is ", "What are ")
LONGEST_QUESTION = 1500
"""The most characters of a question with the end of a chat template. Text before them is part of the context."""

TEMPLATE_START = re.compile(
    r"""\s*(
        <[|｜]?[\w ▁]+[|｜]?>        # <s>, <|im_start|>, <start_of_turn>, <BOS_TOKEN>
        | \[(INST|gMASK)\]
        | (USER|User|Human|System):
        | A\ chat\ between\ a\       # Vicuna
        | You\ are\ a\ helpful\      # LWM
    )""",
    re.VERBOSE,
)
"""A special token or another mark that begins a turn or a text, or one of the two system prompts without a mark."""


def published_example(row: Mapping[str, Any], task: str, reserved: int, scoring: str, at: str) -> Example:
    """Return a row of published data as an example.

    Args:
        row: needs `input` (a string) and `outputs` (a list of strings), or `context`, `question` (strings) and `answer`
            (a list of strings, or one).
        task: the task's name, which is the kind of the question.
        reserved: the most tokens of an answer, if the row does not state it.
        scoring: a name in `kvjax.tasks.prompt.SCORES`.
        at: the row's position, for errors.

    Raises:
        UserError: a field is missing or invalid.
    """
    prefix = row_text(row, "answer_prefix", at) if row.get("answer_prefix") is not None else ""
    if "context" in row:
        context, question = row_text(row, "context", at), row_text(row, "question", at)
        expected = row_texts(row, "answer", at, single=True)
    else:
        text = row_text(row, "input", at).removesuffix(prefix)
        cut = 1 + max(text.rfind(f"\n{start}", -LONGEST_QUESTION) for start in QUESTION_STARTS)
        context, question = text[:cut], text[cut:]
        expected = row_texts(row, "outputs", at)
    if row.get("max_new_tokens") is not None:
        reserved = whole_number(at, "`max_new_tokens`", row["max_new_tokens"])
    asked = ExampleQuestion(question, prefix, expected, scoring, reserved, task)
    templated = TEMPLATE_START.match(context or question) is not None
    return Example(context, (asked,), as_is=templated)


def published_rows(data: Path, task: str, length: int) -> list[Row]:
    """Return a task's rows, in their order.

    Args:
        data: a folder with the file TASK.jsonl, TASK.parquet or TASK/validation.jsonl (where RULER's programs write
            it), or with .jsonl or .parquet files of rows with a `task`. Or a hub dataset, OWNER/NAME, with a
            configuration for each length, whose split `test` has rows with a `task`.

    Raises:
        UserError: there are no rows of the task, or a file cannot be read.
    """
    if data.is_file():
        raise UserError(f"{OPTION} {data}: expected a folder, got a file")
    if is_hub_name(data):
        rows = list(_hub_rows(data.as_posix(), task, str(length)))
        expected = f"a column `task` that names it, in the configuration {length}"
    else:
        rows = list(_folder_rows(data, task))
        expected = f"{task}.jsonl, {task}.parquet, {task}/validation.jsonl, or files with a column `task`"
    if not rows:
        raise UserError(f"{OPTION} {data}: there are no samples of {task}, expected {expected}")
    return rows


def _folder_rows(folder: Path, task: str) -> Iterator[Row]:
    if not folder.is_dir():
        raise UserError(
            f"{OPTION} {folder}: there is no such folder; expected a folder, or a hub dataset OWNER/NAME"
        )
    for name in (f"{task}.jsonl", f"{task}.parquet", f"{task}/validation.jsonl"):
        if (folder / name).is_file():
            yield from file_rows(folder / name, OPTION)
            return
    for file in table_files(folder):
        yield from ((at, row) for at, row in file_rows(file, OPTION, task) if row.get("task") == task)


def _hub_rows(name: str, task: str, configuration: str) -> Iterator[Row]:
    ((_, rows),) = hub_splits(name, OPTION, configuration)
    tasks = rows["task"] if "task" in rows.column_names else []
    indices = [index for index, other in enumerate(tasks) if other == task]
    return (
        (f"{OPTION} {name}: row {index}", dict(row))
        for index, row in zip(indices, rows.select(indices), strict=True)
    )


@dataclass(frozen=True)
class PublishedSamples:
    """RULER's own samples of a task, in their order."""

    name: str
    """The task's name."""
    data: Path
    """The folder, or the name of the hub dataset."""
    encode: PromptEncoder
    read: Callable[[int], list[Example]]
    """Reads all examples of a length."""
    metric = HOLDS
    published = True
    _examples_by_length: dict[int, list[Example]] = field(default_factory=dict, init=False, repr=False)

    def answers(self, length: int) -> int:
        return 1

    def samples(self, split: Split, count: int, length: int) -> list[Sample]:
        """Return the first samples to compare, or the next ones to calibrate on.

        Raises UserError if there are too few, or if their length does not fit `length`.
        """
        where = f"{OPTION} {self.data}"
        examples = [(example.source, example) for example in self._examples(length)]
        taken = split.take_published(examples, count, where, f"samples of {self.name}")
        samples = [replace(self.encode(example), source=source) for source, example in taken]
        sizes = [len(sample.context) + sample.tokens_after_context for sample in samples]
        for index, size in enumerate(sizes, split.compared if split.calibration else 0):
            if size > length:
                raise UserError(
                    f"{where}: sample {index} of {self.name} takes {size} tokens with its answer, more than "
                    f"--context {length}"
                )
        if 2 * max(sizes) < length:
            raise UserError(
                f"{where}: the longest sample of {self.name} takes {max(sizes)} tokens with its answer, less than half "
                f"of --context {length}: use the length for which they were made"
            )
        return samples

    def _examples(self, length: int) -> list[Example]:
        """Return all examples of a length. Raises UserError for a second length from a folder, which has one file for a
        task."""
        if length not in self._examples_by_length:
            if self._examples_by_length and self.data.is_dir():
                raise UserError(
                    f"{OPTION} {self.data}: a folder's samples have one length, got --context "
                    f"{', '.join(map(str, (*self._examples_by_length, length)))}; evaluate a folder for each length"
                )
            self._examples_by_length[length] = self.read(length)
        return self._examples_by_length[length]
