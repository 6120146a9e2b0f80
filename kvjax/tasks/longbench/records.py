"""LongBench's rows as examples: `input`, `context`, `answers`, and `all_classes` of the classifications.

They are published as data.zip in the dataset THUDM/LongBench, with a file TASK.jsonl for each task. LongBench-E reports
three ranges of a row's `length` in words, which are the kinds of its questions.
"""

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvjax.errors import UserError, whole_number
from kvjax.files import check_regular
from kvjax.tasks.datasets import (
    Row,
    folder_rows,
    hub_file,
    hub_rows,
    is_hub_name,
    jsonl_rows,
    row_field,
    row_text,
    row_texts,
)
from kvjax.tasks.longbench.tasks import EVEN, longbench_task
from kvjax.tasks.prompt import Example, ExampleQuestion

DATA = "longbench"
"""The name of its data in --data."""
OPTION = f"--data {DATA}"
LARGEST = 1 << 30
"""The most bytes of a file in an archive, unpacked. The published files have less than a tenth of it."""
HUB, ARCHIVE = "THUDM/LongBench", "data.zip"
BOUNDS = {"0-4k": 4000, "4-8k": 8000}
"""LongBench-E's first two ranges of lengths, each with its exclusive upper bound in words."""
LONGEST = "8k+"
"""LongBench-E's third range."""


def longbench_examples(name: str, data: Path | None) -> list[Example]:
    """Return a task's rows, in their order.

    Args:
        name: one of `NAMES`.
        data: a folder with TASK.jsonl, TASK.parquet or a folder TASK of such files; data.zip as it is published; or a
            hub dataset, OWNER/NAME, with a configuration TASK. None stands for the published data.zip on the hub.

    Raises:
        UserError: the data is missing, a file cannot be read, or a field is missing or invalid.
    """
    return [_example(row, name, at) for at, row in _rows(name, data)]


def _rows(name: str, data: Path | None) -> Iterator[Row]:
    data = hub_file(HUB, ARCHIVE, OPTION) if data is None else data
    if data.suffix == ".zip":
        return _archive_rows(data, name)
    if data.is_dir():
        return folder_rows(data, name, OPTION)
    if is_hub_name(data):
        return hub_rows(data.as_posix(), OPTION, name)
    raise UserError(f"{OPTION} {data}: expected a folder, {ARCHIVE} or a hub dataset, OWNER/NAME")


def _archive_rows(archive: Path, name: str) -> Iterator[Row]:
    check_regular(archive, OPTION)
    try:
        with zipfile.ZipFile(archive) as opened:
            # macOS stores a file's attributes under the same name in __MACOSX
            members = [
                member
                for member in opened.infolist()
                if member.filename.split("/")[-1] == f"{name}.jsonl" and "__MACOSX" not in member.filename
            ]
            if len(members) != 1:
                number = len(members) or "no"
                raise UserError(f"{OPTION} {archive}: expected one {name}.jsonl in it, got {number}")
            # zipfile unpacks no more than this stated size
            if members[0].file_size > LARGEST:
                raise ValueError(f"{members[0].file_size:,} bytes, more than {LARGEST:,}")
            text = opened.read(members[0]).decode("utf-8-sig")
    except UserError:
        raise
    except Exception as error:  # zipfile raises all kinds of errors for a damaged file
        raise UserError(f"{OPTION} {archive}: cannot be read ({' '.join(str(error).split())})") from None
    return jsonl_rows(text, f"{OPTION} {archive}: {members[0].filename}")


def _example(row: Mapping[str, Any], name: str, at: str) -> Example:
    task = longbench_task(name)
    context, question_text = row_text(row, "context", at), row_text(row, "input", at)
    classes = row_texts(row, "all_classes", at) if task.metric.classes else ()
    question = ExampleQuestion(
        task.question.format(input=question_text),
        "",
        row_texts(row, "answers", at),
        task.metric.scoring(classes),
        task.reserved,
        _length_range(row, at) if name.endswith(EVEN) else name,
    )
    return Example(task.context.format(context=context), (question,), as_is=not task.chat)


def _length_range(row: Mapping[str, Any], at: str) -> str:
    words = whole_number(at, "`length`", row_field(row, "length", at))
    return next((kind for kind, bound in BOUNDS.items() if words < bound), LONGEST)
