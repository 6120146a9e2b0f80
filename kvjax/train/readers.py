"""Where documents come from: files on this machine, or a streamed hub data set."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from kvjax.errors import UserError
from kvjax.train.conversation import document
from kvjax.train.documents import KINDS, Documents

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


class HubReader:
    """A streamed hub data set's `text` column, or chats in its `messages`, every `groups`-th document."""

    def __init__(self, dataset: Any, group: int, groups: int):
        from datasets.distributed import split_dataset_by_node

        self._dataset = split_dataset_by_node(dataset, rank=group, world_size=groups)
        self._start = self._dataset.state_dict()
        self._rows: Iterator[Any] = iter(self._dataset)

    def next(self) -> str | None:
        row = next(self._rows, None)
        if row is None:
            self.set_state(self._start)
            return None
        try:
            return document(row)
        except ValueError:
            raise UserError(
                f"the data set has no `text` column of strings, it has {', '.join(row)}"
            ) from None

    def get_state(self) -> Any:
        return self._dataset.state_dict()

    def set_state(self, state: Any) -> None:
        self._dataset.load_state_dict(state)
        self._rows = iter(self._dataset)


def open_source(source: str, seed: int, piece: int) -> Callable[[int, int], Reader]:
    """What gives readers of a group's every `groups`-th document, by (group, groups).

    Args:
        source: a .txt, .jsonl or .parquet file or a folder of them, in an order drawn from `seed`; or a hub data set,
            in its own.
        piece: bytes of a .txt file that are a document (`Documents`).

    Raises:
        UserError: nothing there, or nothing in it.
    """
    if (path := Path(source).expanduser()).exists():
        documents = Documents(path, seed, piece)
        return lambda group, groups: FileReader(documents, group, groups)
    hub = open_hub(source)
    return lambda group, groups: HubReader(hub, group, groups)


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
