"""Files and folders that are there whole or not at all, whatever stops the writer."""

import contextlib
import fcntl
import glob
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path


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
    with _locked(target.parent):
        for left in target.parent.glob(f"{glob.escape(prefix)}*"):
            with _locked(left, wait=False) as unused:
                if unused:
                    shutil.rmtree(left, ignore_errors=True)
        partial = target.with_name(prefix + uuid.uuid4().hex[:8])
        partial.mkdir()
        own = contextlib.ExitStack()
        own.enter_context(_locked(partial))
    with own:
        try:
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path, *, wait: bool = True) -> Iterator[bool]:
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
