"""Files and folders that are there whole or not at all, whatever stops the writer, and text that is either read or
refused in one line."""

import codecs
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


LARGEST_TEXT = 4 << 30
"""The most bytes of a text file that is read whole."""
UTF16 = codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE
"""The marks that UTF-16 files begin with."""


def is_there(path: Path, option: str) -> bool:
    """Return True if there is a file or a folder. Raises `UserError` for a path that cannot exist."""
    try:
        return path.exists()
    except OSError as error:  # such as a name that is too long
        raise UserError(f"{option} {path}: {error.strerror or error}") from None


def check_regular(file: Path, option: str = "", *, pipe: bool = False) -> int:
    """Return a file's size. Raises `UserError`, before anything is opened, for a device, a pipe unless it is allowed,
    a folder, or a file that is not there. It names the option."""
    where = f"{option} {file}".lstrip()
    try:
        found = file.stat()
    except (OSError, ValueError) as error:
        raise UserError(f"{where}: cannot be read ({os_reason(error)})") from None
    if stat.S_ISDIR(found.st_mode):
        raise UserError(f"{where}: is a folder, expected a file")
    if not (stat.S_ISREG(found.st_mode) or (pipe and stat.S_ISFIFO(found.st_mode))):
        raise UserError(f"{where}: is a pipe or a device, expected a file")
    return found.st_size


def os_reason(error: Exception) -> str:
    """Return the operating system's description of an error."""
    return getattr(error, "strerror", None) or str(error)


def read_text(file: Path, option: str, *, most: int = LARGEST_TEXT, pipe: bool = False) -> str:
    """Return a file's text, its lines ended by line feeds, without a byte-order mark.

    Args:
        most: bytes that it may have.
        pipe: True if it may be a pipe.

    Raises:
        UserError: what cannot be read, is no file, is larger, or is not UTF-8 text. It names the option.
    """
    if check_regular(file, option, pipe=pipe) > most:
        raise UserError(f"{option} {file}: is larger than {most >> 10} KiB")
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UserError(f"{option} {file}: cannot be read ({os_reason(error)})") from None
    try:
        text = data.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        at = error.start + len(data) - len(error.object)
        raise UserError(f"{option} {file}: {not_utf8(data[:2], data[at], at)}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def not_utf8(begin: bytes, byte: int, at: int) -> str:
    """Return what is wrong with a file that is not UTF-8, by its first bytes and the first one that cannot be read."""
    if begin[:2] in UTF16:
        return "is not UTF-8 text but UTF-16: convert it (iconv -f UTF-16 -t UTF-8)"
    advice = "if it is Latin-1, convert it (iconv -f LATIN1 -t UTF-8)"
    return f"is not UTF-8 text: byte 0x{byte:02x} at offset {at}; {advice}"


def write_text(file: Path, text: str, *, new: bool = False) -> None:
    """Write beside `file` and move into place. `new`: raise FileExistsError if it is there, also if another process
    made it just now."""
    partial = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}")
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
    """Yield a new folder beside `target`, for files that are moved to `target` once they are whole. It is removed at
    the end.

    Every call has a folder of its own and holds a lock on it, which ends with the process. Folders that killed
    processes left for the same target can thus be told from those in use, and are removed first. On a file system
    without locks they stay.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}.partial-"
    # one process at a time: nobody sees a new folder before it is locked
    with locked(target.parent):
        for left in target.parent.glob(f"{glob.escape(prefix)}*"):
            with locked(left, wait=False) as unused:
                if unused:
                    shutil.rmtree(left, ignore_errors=True)
        partial = target.with_name(prefix + uuid.uuid4().hex[:8])
        partial.mkdir()
        own = contextlib.ExitStack()
        own.enter_context(locked(partial))
    with own:
        try:
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of a folder. Yields True if it was acquired: not if another process holds it and `wait` is False,
    nor where there are no locks."""
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
