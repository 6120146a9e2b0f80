"""Opening of gates, from a folder that training exported or a file of a method's authors."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from kvjax.checkpoints.folder import describe, exported_files, load_arrays
from kvjax.checkpoints.torch_file import TorchFile, is_torch_file

S = TypeVar("S")


@dataclass(frozen=True)
class OpenGates(Generic[S]):
    """Gates whose weights have not been read yet."""

    sizes: S
    """The sizes of the gates, in the method's own type."""
    description: dict[str, Any]
    """The object in their `config.json`."""
    arrays: Callable[[], Mapping[str, Any]]
    """A function that reads the parameters and returns them by name."""


@contextlib.contextmanager
def open_gates(
    path: str | Path,
    described: Callable[[str | Path, dict[str, Any]], S],
    published: Callable[[TorchFile], OpenGates[S]],
) -> Iterator[tuple[OpenGates[S], Path]]:
    """Yield the gates at a path, and the file with their weights.

    Args:
        described: returns the sizes of the gates in a folder, given the folder and its description.
        published: returns the gates in an authors' file.

    Raises:
        UserError: there are no gates, or one of these functions raises it.
    """
    if is_torch_file(path):
        with TorchFile(path) as opened:
            yield published(opened), opened.file
        return
    description = describe(path)
    sizes = described(path, description)
    yield OpenGates(sizes, description, lambda: load_arrays(path)), exported_files(path)[0]
