"""Writing of files and folders that appear whole or not at all, and reading of text files with one-line errors."""

import codecs
import contextlib
import fcntl
import glob
import hashlib
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
"""The maximum bytes of a text file."""
LONGEST_NAME = 200
"""The most bytes of a name that `file_name` leaves as it is."""
UTF16 = codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE
"""The byte-order marks of UTF-16 files."""


def is_there(path: Path, option: str) -> bool:
    """Return True if the path exists. Raises `UserError` for a path that cannot exist."""
    try:
        return path.exists()
    except OSError as error:  # such as a name that is too long
        raise UserError(f"{option} {path}: {error.strerror or error}") from None


def file_name(text: str) -> str:
    """Return a text as the name of a file without a suffix.

    Slashes become underscores and long texts are shortened. Such names end in a digest, so that no two texts share one.
    """
    name = text.replace("/", "_")
    if name == text and len(name.encode()) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME // 4]}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def check_regular(file: Path, option: str = "", *, pipe: bool = False) -> int:
    """Return a file's size, without opening it.

    Args:
        option: the option that names the file, for messages.
        pipe: True if it may be a pipe.

    Raises:
        UserError: it does not exist, or is a folder, a device or (unless allowed) a pipe.
    """
    where = f"{option} {file}".lstrip()
    try:
        status = file.stat()
    except (OSError, ValueError) as error:
        raise UserError(f"{where}: cannot be read ({os_reason(error)})") from None
    if stat.S_ISDIR(status.st_mode):
        raise UserError(f"{where}: is a folder, expected a file")
    if not (stat.S_ISREG(status.st_mode) or (pipe and stat.S_ISFIFO(status.st_mode))):
        raise UserError(f"{where}: is a pipe or a device, expected a file")
    return status.st_size


def os_reason(error: Exception) -> str:
    """Return the operating system's description of an error."""
    return getattr(error, "strerror", None) or str(error)


def read_text(file: Path, option: str, *, most: int = LARGEST_TEXT, pipe: bool = False) -> str:
    """Return a file's text with line feeds as line ends, and without a byte-order mark.

    Args:
        option: the option that names the file, for messages.
        most: the maximum bytes.
        pipe: True if it may be a pipe.

    Raises:
        UserError: it cannot be read, is not a file, is too large, or is not UTF-8.
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
        offset = error.start + len(data) - len(error.object)
        raise UserError(f"{option} {file}: {not_utf8(data[:2], data[offset], offset)}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def not_utf8(first_bytes: bytes, byte: int, offset: int) -> str:
    """Return an error message for a file that is not UTF-8, given its first bytes and its first invalid byte."""
    if first_bytes[:2] in UTF16:
        return "is not UTF-8 text but UTF-16: convert it (iconv -f UTF-16 -t UTF-8)"
    advice = "if it is Latin-1, convert it (iconv -f LATIN1 -t UTF-8)"
    return f"is not UTF-8 text: byte 0x{byte:02x} at offset {offset}; {advice}"


def write_text(file: Path, text: str, *, new: bool = False) -> None:
    """Write a text file at once, through a temporary file in the same folder. `new`: raise FileExistsError if the file
    exists, even if another process has only just made it."""
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
    """Write a safetensors file, and wait until it is on the disk. Its permissions follow the umask; safetensors 0.8
    alone would let only the owner read it.

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
    """Yield a new folder next to `target`, for the caller to fill and move to `target`. If it is not moved, it is
    removed at the end.

    Each call holds a lock on its folder. The lock ends with the process, so that folders left by killed processes can
    be told from folders in use. They are removed first. On a file system without locks they stay.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}.partial-"
    # one process at a time, so that nobody sees a new folder before it is locked
    with locked(target.parent):
        for leftover in target.parent.glob(f"{glob.escape(prefix)}*"):
            with locked(leftover, wait=False) as unused:
                if unused:
                    shutil.rmtree(leftover, ignore_errors=True)
        partial = target.with_name(prefix + uuid.uuid4().hex[:8])
        partial.mkdir()
        lock = contextlib.ExitStack()
        lock.enter_context(locked(partial))
    with lock:
        try:
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of a folder. Yields False if it was not acquired: another process holds it and `wait` is False, or
    the file system has no locks."""
    try:
        opened = os.open(folder, os.O_RDONLY)
    except OSError:  # another process has just moved or removed it
        yield False
        return
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            acquired = True
        except OSError:
            acquired = False
        yield acquired
    finally:
        os.close(opened)
