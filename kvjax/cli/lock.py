"""A lock that lets only one process at a time write into a folder of results."""

import fcntl
import os
from pathlib import Path
from types import TracebackType

from kvjax.errors import UserError

LOCK = ".lock"
"""The lock file in the folder. The lock ends with the process, even if that is killed; the file stays."""


class FolderLock:
    """A context that holds the lock of a folder: from its beginning if the folder exists, otherwise from `take`.

    On a file system without locks nothing is locked.

    Raises:
        UserError: another process holds the lock.
    """

    def __init__(self, folder: Path, option: str, *, wanted: bool = True):
        """Store the folder and the option that names it, for messages. `wanted`: False if another process of the same
        run holds the lock."""
        self._folder, self._option, self._wanted = folder, option, wanted
        self._opened: int | None = None

    def take(self) -> None:
        """Take the lock, if the folder exists by now."""
        if self._opened is not None or not self._wanted or not self._folder.is_dir():
            return
        try:
            opened = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:  # writing the results will report the problem
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
