"""Readers of documents, from files on this machine or from a streamed hub dataset."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from kvjax.errors import UserError, warn
from kvjax.files import is_there
from kvjax.train.conversation import document
from kvjax.train.documents import KINDS, Check, Documents, digest

MAX_BAD, MAX_BAD_SHARE = 10, 0.01
"""The number of records of a streamed dataset that may be bad: a constant, plus a share of the records read."""
HUB_SECONDS = 10.0
"""The timeout of the question whether the hub has a dataset."""


@runtime_checkable
class Reader(Protocol):
    """A reader that goes over documents again and again. `next` returns None at the end of each pass."""

    def next(self) -> str | None: ...

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...


def next_to_train_on(reader: Reader, held_out: Collection[bytes], source: str) -> str:
    """Return the reader's next text whose digest is not in `held_out`.

    Raises UserError if two passes over the documents have none: the first may have started in the middle.
    """
    passes = 0
    while passes < 2:
        text = reader.next()
        passes += text is None
        if text and digest(text) not in held_out:
            return text
    raise UserError(
        f"--data {source}: this process's share of the documents has none to train on: give more documents, or fewer "
        "processes"
    )


class FileReader:
    """A reader of the documents `first`, `first + stride`, … of local files, in an order drawn from the seed."""

    def __init__(self, documents: Documents, first: int, stride: int):
        self._documents, self._first, self._stride = documents, first % len(documents), stride
        self._next = self._first

    def next(self) -> str | None:
        if self._next >= len(self._documents):
            self._next = self._first
            return None
        self._next += self._stride
        return self._documents[self._next - self._stride]

    def get_state(self) -> int:
        return self._next

    def set_state(self, state: int) -> None:
        self._next = state


class Records:
    """The documents of one pass over the records of a streamed dataset. Records cannot be checked beforehand. Bad
    records, which are not documents or which `check` refuses, are skipped up to a limit (`MAX_BAD`, `MAX_BAD_SHARE`).
    """

    def __init__(self, records: Iterator[Mapping[str, Any]], name: str, check: Check = lambda text: None):
        self._records, self._name, self._check = records, name, check
        self._read, self._bad = 0, 0

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield each record's document, empty if it has no text, with the record.

        Raises UserError if too many records were skipped, or if one cannot be read.
        """
        while True:
            try:
                record = next(self._records, None)
            except Exception as error:  # the hub's client raises dozens of kinds
                reason = f"{type(error).__name__}: {str(error)[:200]}"
                raise UserError(
                    f"--data {self._name}: record {self._read + 1:,} of this pass cannot be read ({reason})"
                ) from None
            if record is None:
                return
            yield self._document(record), record

    def _document(self, record: Mapping[str, Any]) -> str:
        self._read += 1
        try:
            text = document(record)
            text.encode()
            self._check(text)
            return text
        except ValueError as error:
            self._bad += 1
            if self._bad == 1:
                message = "records that are not documents are skipped, up to 1% of them"
                warn(f"--data {self._name}: {message} ({error})", stacklevel=2)
            if self._bad > MAX_BAD + MAX_BAD_SHARE * self._read:
                raise UserError(
                    f"--data {self._name}: {self._bad:,} of its first {self._read:,} records are not documents "
                    f"({error})"
                ) from None
            return ""


class HubReader:
    """A reader of every `groups`-th document of a streamed hub dataset, from the column `text` or `messages`."""

    def __init__(self, dataset: Any, group: int, groups: int, name: str, check: Check = lambda text: None):
        from datasets.distributed import split_dataset_by_node

        self._dataset = split_dataset_by_node(dataset, rank=group, world_size=groups)
        self._start, self._record_arguments = self._dataset.state_dict(), (name, check)
        self._documents = iter(Records(iter(self._dataset), *self._record_arguments))

    def next(self) -> str | None:
        text, _ = next(self._documents, (None, None))
        if text is None:
            self.set_state(self._start)
        return text

    def get_state(self) -> Any:
        return self._dataset.state_dict()

    def set_state(self, state: Any) -> None:
        self._dataset.load_state_dict(state)
        self._documents = iter(Records(iter(self._dataset), *self._record_arguments))


def local_path(source: str) -> Path | None:
    """Return the path of local data, None if it does not exist. Raises UserError if no file can have this name."""
    try:
        path = Path(source).expanduser()
    except RuntimeError:  # the home folder of an unknown user
        return None
    return path if is_there(path, "--data") else None


def open_source(
    source: str, seed: int, piece: int, check: Check = lambda text: None
) -> Callable[[int, int], Reader]:
    """Return a function of (group, groups) that opens a reader of every `groups`-th document from `group` on.

    Args:
        source: a .txt, .jsonl or .parquet file or a folder of them, read in an order drawn from `seed`; or a hub data
            set, read in its own order.
        piece: the maximum number of bytes of a document of a .txt file (`Documents`).
        check: a function that raises UserError for a document that cannot be used.

    Raises:
        UserError: the source does not exist, or local files cannot be used (`Documents`).
    """
    if (path := local_path(source)) is not None:
        documents = Documents(path, seed, piece, check)
        return lambda group, groups: FileReader(documents, group, groups)
    hub = open_hub(source)
    return lambda group, groups: HubReader(hub, group, groups, source, check)


def open_hub(name: str) -> Any:
    """Open a hub dataset for streaming: `NAME`, `NAME:CONFIG` or `NAME:CONFIG:SPLIT` (`NAME::SPLIT`), by default its
    train split. Raises UserError if it cannot be opened."""
    path, config, split = [*name.split(":", 2), "", ""][:3]
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path) or Path(path).suffix in KINDS:
        raise UserError(f"--data {name}: no such file or folder")

    import datasets
    import huggingface_hub

    try:
        # ask the hub first: `datasets` retries for half a minute if the hub does not answer
        huggingface_hub.dataset_info(path, timeout=HUB_SECONDS)
        return datasets.load_dataset(path, config or None, split=split or "train", streaming=True)
    except Exception as error:  # the hub's client raises dozens of kinds
        raise UserError(
            f"--data {name}: no such file or folder, and as a hub dataset it cannot be had ({type(error).__name__}: "
            f"{error})"
        ) from None
