"""Compiled programs that are kept on disk, so that what was compiled once is not compiled again by another process."""

import os
import sys
from pathlib import Path
from typing import Any

PROGRAM_BYTES = 2 << 30
"""Of compiled programs that are kept; of more, those used longest ago go."""


def keep_programs() -> None:
    """Have compiled programs kept in the user's cache folder from here on, unless the program or the environment says
    where (`JAX_COMPILATION_CACHE_DIR`) or that they should not be (`JAX_ENABLE_COMPILATION_CACHE=false`)."""
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
    config.update("jax_compilation_cache_dir", str(folder))
    config.update("jax_compilation_cache_max_size", PROGRAM_BYTES)
    config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
