"""One process at a time writes into a folder of results."""

import fcntl
import os
from pathlib import Path
from types import TracebackType

from kvjax.errors import UserError

LOCK = ".lock"
"""The lock file in the folder. The lock ends with the process, however that ends; the file stays."""


class FolderLock:
    """A context in which the folder is this process's own: from its beginning if the folder is there, else from `take`.

    On a file system without locks nothing is locked.

    Raises:
        UserError: another process has it.
    """

    def __init__(self, folder: Path, option: str, *, wanted: bool = True):
        """Remember the folder and the option that named it. `wanted`: False where another process of the same run holds
        the lock."""
        self._folder, self._option, self._wanted = folder, option, wanted
        self._opened: int | None = None

    def take(self) -> None:
        """Take the lock, now that the folder was made."""
        if self._opened is not None or not self._wanted or not self._folder.is_dir():
            return
        try:
            opened = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:  # writing there will say what is wrong
            return
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(opened)
            raise UserError(
                f"{self._option} {self._folder}: another process is writing there; wait for its end, or name another "
                "folder"
            ) from None
        except OSError:
            os.close(opened)
            return
        self._opened = opened

    def __enter__(self) -> "FolderLock":
        self.take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._opened is not None:
            os.close(self._opened)
            self._opened = None
