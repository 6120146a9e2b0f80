"""Where rows of RULER's own data come from: a folder's .jsonl and .parquet files, or a hub data set."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvjax.errors import UserError
from kvjax.files import read_text

Row = tuple[str, dict[str, Any]]
"""Where it stands, and its fields."""

OPTION = "--ruler-data"


def published_rows(data: Path, task: str, length: int) -> list[Row]:
    """A task's rows, in their order.

    Args:
        data: a folder with the file TASK.jsonl, TASK.parquet or TASK/validation.jsonl (where RULER's programs write
            it), or with .jsonl or .parquet files of rows that name their `task`. Else a hub data set, OWNER/NAME, with
            a configuration for each length, whose split `test` has rows that name their `task`.

    Raises:
        UserError: no rows of the task there, or a file that cannot be read.
    """
    if data.is_file():
        raise UserError(f"{OPTION} {data}: is a file; pass the folder that holds it")
    if not data.is_dir() and len(data.parts) == 2 and not data.is_absolute():
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
            f"{OPTION} {folder}: there is no such folder, and a hub data set is called OWNER/NAME"
        )
    for name in (f"{task}.jsonl", f"{task}.parquet", f"{task}/validation.jsonl"):
        if (folder / name).is_file():
            yield from _file_rows(folder / name)
            return
    for file in sorted(file for file in folder.iterdir() if file.suffix in (".jsonl", ".parquet")):
        yield from ((at, row) for at, row in _file_rows(file, task) if row.get("task") == task)


def _file_rows(file: Path, task: str | None = None) -> Iterator[Row]:
    """A file's rows; of a .parquet file those of the task alone, if one is named."""
    return _jsonl_rows(file) if file.suffix == ".jsonl" else _parquet_rows(file, task)


def _jsonl_rows(file: Path) -> Iterator[Row]:
    for number, line in enumerate(read_text(file, OPTION).split("\n"), 1):
        if line.strip():
            at = f"{OPTION} {file}: line {number}"
            try:
                yield at, dict(json.loads(line))
            except (ValueError, TypeError):
                raise UserError(f"{at} is no JSON object, it starts {line[:60]}") from None


def _parquet_rows(file: Path, task: str | None) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            named = "task" in opened.schema_arrow.names
        wanted = None if task is None else [("task", "=", task)]
        rows = [] if wanted and not named else pyarrow.parquet.read_table(file, filters=wanted).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{OPTION} {file}: is no parquet file ({' '.join(str(error).split())})") from None
    return ((f"{OPTION} {file}: row {index}", row) for index, row in enumerate(rows))


def _hub_rows(name: str, task: str, configuration: str) -> Iterator[Row]:
    import datasets

    try:
        rows = datasets.load_dataset(name, configuration, split="test")
    except Exception as error:  # the hub's client raises dozens of kinds
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{OPTION} {name}: no such folder, and as a hub data set it cannot be had with the configuration "
            f"{configuration} ({type(error).__name__}: {reason})"
        ) from None
    tasks = rows["task"] if "task" in rows.column_names else []
    at = [index for index, found in enumerate(tasks) if found == task]
    return (
        (f"{OPTION} {name}: row {index}", dict(row)) for index, row in zip(at, rows.select(at), strict=True)
    )
