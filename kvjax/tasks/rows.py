"""Rows of published data: .jsonl and .parquet files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvjax.errors import UserError
from kvjax.files import read_text

Row = tuple[str, dict[str, Any]]
"""Where it stands, and its fields."""


def file_rows(file: Path, option: str, task: str | None = None) -> Iterator[Row]:
    """A file's rows; of a .parquet file those whose column `task` names the task alone, if one is named.

    Raises UserError, which names the option, for a file that cannot be read.
    """
    return _jsonl_rows(file, option) if file.suffix == ".jsonl" else _parquet_rows(file, option, task)


def _jsonl_rows(file: Path, option: str) -> Iterator[Row]:
    for number, line in enumerate(read_text(file, option).split("\n"), 1):
        if line.strip():
            at = f"{option} {file}: line {number}"
            try:
                yield at, dict(json.loads(line))
            except (ValueError, TypeError):
                raise UserError(f"{at} is no JSON object, it starts {line[:60]}") from None


def _parquet_rows(file: Path, option: str, task: str | None) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            named = "task" in opened.schema_arrow.names
        wanted = None if task is None else [("task", "=", task)]
        rows = [] if wanted and not named else pyarrow.parquet.read_table(file, filters=wanted).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{option} {file}: is no parquet file ({' '.join(str(error).split())})") from None
    return ((f"{option} {file}: row {index}", row) for index, row in enumerate(rows))
