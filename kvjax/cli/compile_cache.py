"""The cache of compiled programs on disk, so that later processes need not compile them again."""

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

PROGRAM_BYTES = 2 << 30
"""The maximum bytes of the cache. Beyond that, the least recently used programs are removed."""
CHECKED_BYTES = 64 << 20
"""The maximum bytes of new programs that are read at a start, to check that they are complete."""


def keep_programs() -> None:
    """Keep compiled programs in the user's cache folder from now on, unless the environment or `jax.config` names
    another folder (`JAX_COMPILATION_CACHE_DIR`) or disables the cache (`JAX_ENABLE_COMPILATION_CACHE=false`)."""
    import jax

    config: Any = jax.config
    if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        return
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvjax" / "programs"
    try:
        new = not folder.is_dir()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # there is no home, or it is not writable
        return
    if new:
        print(
            f"Compiled programs are kept in {folder} for later runs (not with "
            "JAX_ENABLE_COMPILATION_CACHE=false).",
            file=sys.stderr,
        )
    with contextlib.suppress(OSError):  # another process may remove some at the same time
        remove_broken(folder)
    config.update("jax_compilation_cache_dir", str(folder))
    config.update("jax_compilation_cache_max_size", PROGRAM_BYTES)
    config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def remove_broken(folder: Path) -> None:
    """Remove programs that a killed process wrote only in part. JAX would warn of them at every start and never replace
    them. Only programs written since the last check are read."""
    from jax._src.compilation_cache import decompress_executable

    marker, left = folder / ".checked", CHECKED_BYTES
    since = marker.stat().st_mtime if marker.exists() else 0.0
    marker.touch()
    written = {entry: entry.stat() for entry in folder.glob("*-cache")}
    for entry, stat in sorted(written.items(), key=lambda item: -item[1].st_mtime):
        access = entry.with_name(entry.name.removesuffix("-cache") + "-atime")
        try:
            complete = access.exists()  # JAX writes it after the program
            if complete and stat.st_mtime >= since and (left := left - stat.st_size) >= 0:
                decompress_executable(entry.read_bytes())
        except Exception:  # zlib and zstandard have their own exceptions
            complete = False
        if not complete:
            entry.unlink(missing_ok=True)
            access.unlink(missing_ok=True)
