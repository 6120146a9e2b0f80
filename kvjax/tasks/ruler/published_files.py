"""Where rows of RULER's own data come from: a folder's .jsonl and .parquet files, or a hub data set."""

from collections.abc import Iterator
from pathlib import Path

from kvjax.errors import UserError
from kvjax.tasks.datasets import Row, file_rows, hub_splits, is_hub_name, table_files

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
            f"{OPTION} {folder}: there is no such folder, and a hub data set is called OWNER/NAME"
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
    at = [index for index, found in enumerate(tasks) if found == task]
    return (
        (f"{OPTION} {name}: row {index}", dict(row)) for index, row in zip(at, rows.select(at), strict=True)
    )
