"""Gates in a folder that training exported, or in a file that a method's authors wrote."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from kvjax.checkpoints.folder import describe, exported_files, load_arrays
from kvjax.checkpoints.torch_file import TorchFile, is_torch_file

S = TypeVar("S")


@dataclass(frozen=True)
class Found(Generic[S]):
    """Gates whose weights are not read yet."""

    sizes: S
    """The sizes of the gates, as the method has them."""
    description: dict[str, Any]
    """The description of the gates."""
    arrays: Callable[[], Mapping[str, Any]]
    """Reads the parameters, by name."""


@contextlib.contextmanager
def open_gates(
    path: str | Path,
    described: Callable[[str | Path, dict[str, Any]], S],
    published: Callable[[TorchFile], Found[S]],
) -> Iterator[tuple[Found[S], Path]]:
    """Yield the gates at a path, and the file with the weights.

    Args:
        described: returns the sizes of gates in a folder, by its description. published: returns the gates in an
            authors' file.

    Raises:
        UserError: there is neither, or what these raise.
    """
    if is_torch_file(path):
        with TorchFile(path) as opened:
            yield published(opened), opened.file
        return
    description = describe(path)
    yield Found(described(path, description), description, lambda: load_arrays(path)), exported_files(path)[0]
