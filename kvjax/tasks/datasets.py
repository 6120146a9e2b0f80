"""Rows of published data from .jsonl and .parquet files, folders of files and hub datasets, and field checks."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvjax.errors import UserError, check_unicode
from kvjax.files import check_regular, read_text

Row = tuple[str, dict[str, Any]]
"""A row's position, for errors, and its fields."""
SUFFIXES = ".jsonl", ".parquet"
"""Suffixes of the files that are read."""
LARGEST = 4 << 30
"""The most bytes of a .parquet file, unpacked."""
BATCH = 64
"""The number of rows of a .parquet file that are unpacked at once."""


def file_rows(file: Path, option: str, task: str | None = None) -> Iterator[Row]:
    """Return a file's rows. With a task, a .parquet file gives only the rows whose column `task` has its name.

    Raises UserError, naming the option, for a file that cannot be read.
    """
    if file.suffix == ".jsonl":
        return jsonl_rows(read_text(file, option), f"{option} {file}")
    return _parquet_rows(file, option, task)


def json_rows(file: Path, option: str) -> Iterator[Row]:
    """Yield the rows of a .json file. Raises UserError, naming the option, if it is not a list of objects."""
    rows = load_json(file, option)
    if not isinstance(rows, list):
        raise UserError(f"{option} {file}: expected a JSON list of objects")
    for index, row in enumerate(rows):
        at = f"{option} {file}: [{index}]"
        if not isinstance(row, dict):
            raise UserError(f"{at}: expected an object, got {str(row)[:60]}")
        yield at, row


def load_json(file: Path, option: str) -> Any:
    """Return the value of a .json file. Raises UserError, naming the option, for a file that cannot be read."""
    text = read_text(file, option)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{option} {file}: is not JSON ({error})") from None


def jsonl_rows(text: str, where: str) -> Iterator[Row]:
    """Yield the rows of a text with a JSON object on each line. Raises UserError for any other non-empty line."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            at = f"{where}: line {number}"
            try:
                yield at, dict(json.loads(line))
            except (ValueError, TypeError, RecursionError):
                raise UserError(f"{at} is no JSON object, it starts {line[:60]}") from None


def _parquet_rows(file: Path, option: str, task: str | None) -> Iterator[Row]:
    import pyarrow.parquet

    check_regular(file, option)
    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            has_task = "task" in opened.schema_arrow.names
            groups = [opened.metadata.row_group(index) for index in range(opened.num_row_groups)]
            _check_size(sum(group.total_byte_size for group in groups))
            rows, size = [], 0
            for batch in opened.iter_batches(BATCH) if task is None or has_task else ():
                # the sizes above count repeated values once
                _check_size(size := size + batch.nbytes)
                rows += [row for row in batch.to_pylist() if task is None or row["task"] == task]
    except Exception as error:  # pyarrow raises all kinds of errors for a damaged file
        raise UserError(f"{option} {file}: is no parquet file ({type(error).__name__}: {error})") from None
    return ((f"{option} {file}: row {index}", row) for index, row in enumerate(rows))


def _check_size(size: int) -> None:
    if size > LARGEST:
        raise ValueError(f"it unpacks to more than {LARGEST:,} bytes")


def folder_rows(folder: Path, task: str, option: str) -> Iterator[Row]:
    """Yield a task's rows from TASK.jsonl, TASK.parquet or the files of a folder TASK. Raises UserError if none
    exists."""
    subfolder = folder / task
    files = [folder / f"{task}{suffix}" for suffix in SUFFIXES]
    files = [file for file in files if file.is_file()][:1] or (
        table_files(subfolder) if subfolder.is_dir() else []
    )
    if not files:
        raise UserError(f"{option} {folder}: there is no {task}.jsonl, {task}.parquet or folder {task}")
    for file in files:
        yield from file_rows(file, option)


def table_files(folder: Path) -> list[Path]:
    """Return a folder's .jsonl and .parquet files, without hidden ones such as macOS's ._NAME."""
    return sorted(
        file for file in folder.iterdir() if file.suffix in SUFFIXES and not file.name.startswith(".")
    )


def is_hub_name(data: Path) -> bool:
    """Return True if `data` looks like a hub dataset, OWNER/NAME, and no such file or folder exists."""
    return len(data.parts) == 2 and not data.is_absolute() and not data.exists()


def hub_splits(name: str, option: str, configuration: str | None = None) -> list[tuple[str, Any]]:
    """Return the split `test` (or else the first split) of a hub dataset's configuration, with its name.

    Without `configuration`, return the split of each configuration. Raises UserError, naming the option, if the dataset
    cannot be loaded.
    """
    import datasets

    try:
        names = datasets.get_dataset_config_names(name) if configuration is None else [configuration]
        loaded = [(config, datasets.load_dataset(name, config)) for config in names]
    except Exception as error:  # the hub's client raises dozens of kinds
        suffix = "" if configuration is None else f" with the configuration {configuration}"
        raise UserError(
            f"{option} {name}: no such file or folder, and as a hub dataset it cannot be loaded{suffix} "
            f"({type(error).__name__}: {error})"
        ) from None
    return [(config, splits["test" if "test" in splits else next(iter(splits))]) for config, splits in loaded]


def hub_file(name: str, file: str, option: str, revision: str | None = None) -> Path:
    """Return the local copy of a hub dataset's file. Raises UserError, naming the option, if it cannot be loaded."""
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(name, file, repo_type="dataset", revision=revision))
    except Exception as error:  # the hub's client raises dozens of kinds
        raise UserError(
            f"{option}: {file} of {name} cannot be loaded from the hub ({type(error).__name__}: {error}); give a "
            "folder of its files"
        ) from None


def hub_rows(name: str, option: str, configuration: str | None = None) -> Iterator[Row]:
    """Yield the rows of `hub_splits`."""
    for config, split in hub_splits(name, option, configuration):
        yield from ((f"{option} {name}: {config}, row {i}", dict(row)) for i, row in enumerate(split))


def row_field(row: Mapping[str, Any], name: str, at: str) -> Any:
    """Return a row's field. Raises UserError, naming the row, if it is missing."""
    if name not in row:
        raise UserError(f"{at} has no field `{name}`, it has {', '.join(row) or 'none'}")
    return row[name]


def row_text(row: Mapping[str, Any], name: str, at: str) -> str:
    """Return a string field. Raises UserError if it is not a string."""
    text = row_field(row, name, at)
    if not isinstance(text, str):
        raise UserError(f"{at}: expected `{name}` to be a string, got {str(text)[:60]}")
    check_unicode(text, f"{at}: `{name}`")
    return text


def row_objects(row: Mapping[str, Any], name: str, at: str) -> list[Row]:
    """Return a field that is a non-empty list of objects, each with its position. Raises UserError otherwise."""
    objects = row_field(row, name, at)
    if not isinstance(objects, list) or not objects or not all(isinstance(item, dict) for item in objects):
        raise UserError(f"{at}: expected `{name}` to be a list of objects, got {str(objects)[:60]}")
    return [(f"{at}, `{name}` {number}", item) for number, item in enumerate(objects, 1)]


def row_texts(row: Mapping[str, Any], name: str, at: str, *, single: bool = False) -> tuple[str, ...]:
    """Return a field that is a non-empty list of strings, or with `single` a string. Raises UserError otherwise."""
    texts = row_field(row, name, at)
    texts = [texts] if isinstance(texts, str) and single else texts
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise UserError(f"{at}: expected `{name}` to be a list of strings, got {str(texts)[:60]}")
    for text in texts:
        check_unicode(text, f"{at}: `{name}`")
    return tuple(texts)
