"""Files and folders that are there whole or not at all, whatever stops the writer; text that is read or refused in
one line."""

import contextlib
import fcntl
import glob
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvjax.errors import UserError

if TYPE_CHECKING:
    import numpy as np


def read_text(file: Path, option: str) -> str:
    """The file's text. Raises `UserError`, which names the option, if it cannot be read as UTF-8 text."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{option} {file}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError:
        raise UserError(f"{option} {file}: is not UTF-8 text") from None


def write_text(file: Path, text: str, *, new: bool = False) -> None:
    """Write beside `file` and move into place. `new`: raise FileExistsError if it is there, also if another process
    made it just now."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        if new:
            os.link(partial, file)
        else:
            partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def write_tensors(
    file: Path, tensors: dict[str, "np.ndarray"], metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file, and wait until it is on the disk. The umask decides who may read it: safetensors 0.8
    lets only the owner.

    Raises:
        OSError: it could not be written.
    """
    import numpy as np
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    file.touch()
    mode = stat.S_IMODE(file.stat().st_mode)
    try:
        save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, file, metadata=metadata)
    except SafetensorError as error:
        raise OSError(f"{file}: could not be written ({error})") from None
    file.chmod(mode)
    with file.open("rb") as out:
        os.fsync(out.fileno())


@contextlib.contextmanager
def partial_folder(target: Path) -> Iterator[Path]:
    """A new folder beside `target`, for what is moved to `target` once it is whole; removed at the end.

    Every call has a folder of its own and holds a lock on it, which ends with the process. So what killed processes
    left for the same target is told from what others are writing, and is removed first. On a file system without locks
    it stays.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}.partial-"
    # one process at a time: nobody sees a new folder before it is locked
    with locked(target.parent):
        remove_left(target.parent, target.name)
        partial = target.with_name(prefix + uuid.uuid4().hex[:8])
        partial.mkdir()
        own = contextlib.ExitStack()
        own.enter_context(locked(partial))
    with own:
        try:
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def remove_left(parent: Path, name: str) -> None:
    """Remove what killed processes left of `partial_folder` for a target in `parent`, which must be locked."""
    for left in parent.glob(f".{glob.escape(name)}.partial-*"):
        with locked(left, wait=False) as unused:
            if unused:
                shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of a folder; whether it was got: not if another holds it and `wait` is False, nor where there are
    no locks."""
    try:
        opened = os.open(folder, os.O_RDONLY)
    except OSError:  # another process has just moved or removed it
        yield False
        return
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            got = True
        except OSError:
            got = False
        yield got
    finally:
        os.close(opened)
