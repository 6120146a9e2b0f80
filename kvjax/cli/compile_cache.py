"""Compiled programs that are kept on disk, so that what was compiled once is not compiled again by another process."""

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

PROGRAM_BYTES = 2 << 30
"""The most bytes of compiled programs that are kept. Beyond that, those used longest ago go."""
CHECKED_BYTES = 64 << 20
"""The most bytes of the newest programs that are read at a start to see whether they are whole."""


def keep_programs() -> None:
    """Keep compiled programs in the user's cache folder from here on, unless the program or the environment names
    another folder (`JAX_COMPILATION_CACHE_DIR`) or keeps none (`JAX_ENABLE_COMPILATION_CACHE=false`)."""
    import jax

    config: Any = jax.config
    if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        return
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvjax" / "programs"
    try:
        new = not folder.is_dir()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home, or none that can be written: nothing is kept
        return
    if new:
        print(
            f"Compiled programs are kept in {folder} for later runs (not with "
            "JAX_ENABLE_COMPILATION_CACHE=false).",
            file=sys.stderr,
        )
    with contextlib.suppress(OSError):  # another process removes some, too
        remove_broken(folder)
    config.update("jax_compilation_cache_dir", str(folder))
    config.update("jax_compilation_cache_max_size", PROGRAM_BYTES)
    config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def remove_broken(folder: Path) -> None:
    """Remove the programs that a killed process wrote only in part: JAX warns of them at every start and never replaces
    them. Only programs that were written since the last check are read."""
    from jax._src.compilation_cache import decompress_executable

    marker, left = folder / ".checked", CHECKED_BYTES
    since = marker.stat().st_mtime if marker.exists() else 0.0
    marker.touch()
    written = {entry: entry.stat() for entry in folder.glob("*-cache")}
    for entry, stat in sorted(written.items(), key=lambda item: -item[1].st_mtime):
        used = entry.with_name(entry.name.removesuffix("-cache") + "-atime")
        try:
            whole = used.exists()  # it is written behind the program
            if whole and stat.st_mtime >= since and (left := left - stat.st_size) >= 0:
                decompress_executable(entry.read_bytes())
        except Exception:  # zlib's or zstandard's own kinds
            whole = False
        if not whole:
            entry.unlink(missing_ok=True)
            used.unlink(missing_ok=True)
