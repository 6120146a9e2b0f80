"""Where documents come from: files on this machine, or a streamed hub data set."""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from kvjax.errors import UserError, warn
from kvjax.files import is_there
from kvjax.train.conversation import document
from kvjax.train.documents import KINDS, Check, Documents

BAD, SHARE = 10, 0.01
"""A streamed data set may have so many records that are no documents, and this share of those read besides."""
HUB_SECONDS = 10.0
"""That the hub may take to say whether it has a data set."""


@runtime_checkable
class Reader(Protocol):
    """One pass after another over documents; `next` gives None between two passes."""

    def next(self) -> str | None: ...

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...


class FileReader:
    """Documents `first`, `first + stride`, … of local files, in an order drawn from the seed."""

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
    """The documents of a pass over a streamed data set's records, which cannot be checked beforehand: those that are
    none, or that `check` refuses, are skipped, up to a share (`BAD`, `SHARE`)."""

    def __init__(self, records: Iterator[Mapping[str, Any]], name: str, check: Check = lambda text: None):
        self._records, self._name, self._check = records, name, check
        self._read, self._bad = 0, 0

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield each record's document, empty if it has no text, with the record.

        Raises UserError once too many are none, or for a record that cannot be read.
        """
        while True:
            try:
                record = next(self._records, None)
            except Exception as error:  # the hub's client raises dozens of kinds
                said = f"{type(error).__name__}: {str(error)[:200]}"
                raise UserError(
                    f"--data {self._name}: record {self._read + 1:,} of this pass cannot be read ({said})"
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
                what = "records that are no documents are skipped, up to 1% of them"
                warn(f"--data {self._name}: {what} ({error})", stacklevel=2)
            if self._bad > BAD + SHARE * self._read:
                raise UserError(
                    f"--data {self._name}: {self._bad:,} of its first {self._read:,} records are no documents ({error})"
                ) from None
            return ""


class HubReader:
    """A streamed hub data set's `text` column, or chats in its `messages`, every `groups`-th document."""

    def __init__(self, dataset: Any, group: int, groups: int, name: str, check: Check = lambda text: None):
        from datasets.distributed import split_dataset_by_node

        self._dataset = split_dataset_by_node(dataset, rank=group, world_size=groups)
        self._start, self._told = self._dataset.state_dict(), (name, check)
        self._documents = iter(Records(iter(self._dataset), *self._told))

    def next(self) -> str | None:
        text, _ = next(self._documents, (None, None))
        if text is None:
            self.set_state(self._start)
        return text

    def get_state(self) -> Any:
        return self._dataset.state_dict()

    def set_state(self, state: Any) -> None:
        self._dataset.load_state_dict(state)
        self._documents = iter(Records(iter(self._dataset), *self._told))


def local_path(source: str) -> Path | None:
    """Return the path of local data, None if there is none. Raises UserError for a name that no file can have."""
    try:
        path = Path(source).expanduser()
    except RuntimeError:  # the home of nobody
        return None
    return path if is_there(path, "--data") else None


def open_source(
    source: str, seed: int, piece: int, check: Check = lambda text: None
) -> Callable[[int, int], Reader]:
    """Return what gives readers of a group's every `groups`-th document, by (group, groups).

    Args:
        source: a .txt, .jsonl or .parquet file or a folder of them, in an order drawn from `seed`; or a hub data set,
            in its own.
        piece: bytes of a .txt file that are a document (`Documents`).
        check: raises UserError for a document that cannot be used.

    Raises:
        UserError: nothing there, or nothing in it.
    """
    if (path := local_path(source)) is not None:
        documents = Documents(path, seed, piece, check)
        return lambda group, groups: FileReader(documents, group, groups)
    hub = open_hub(source)
    return lambda group, groups: HubReader(hub, group, groups, source, check)


def open_hub(name: str) -> Any:
    """A hub data set, `NAME`, `NAME:CONFIG` or `NAME:CONFIG:SPLIT` (`NAME::SPLIT`), its train split unless another is
    named, streamed. Raises UserError if it cannot be had."""
    path, config, split = [*name.split(":", 2), "", ""][:3]
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path) or Path(path).suffix in KINDS:
        raise UserError(f"--data {name}: no such file or folder")

    import datasets
    import huggingface_hub

    try:
        # asked once first: `datasets` tries a hub that does not answer for half a minute
        huggingface_hub.dataset_info(path, timeout=HUB_SECONDS)
        return datasets.load_dataset(path, config or None, split=split or "train", streaming=True)
    except Exception as error:  # the hub's client raises dozens of kinds
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"--data {name}: no such file or folder, and as a hub data set it cannot be had ({type(error).__name__}: "
            f"{reason})"
        ) from None
