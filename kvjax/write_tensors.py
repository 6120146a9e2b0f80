"""Safetensors files that are as readable as any other file made here."""

import os
import stat
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file


def write_tensors(file: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str] | None = None) -> None:
    """Write, and wait until it is on the disk. The umask decides who may read it: safetensors 0.8 lets only the owner.

    Raises:
        OSError: it could not be written.
    """
    file.touch()
    mode = stat.S_IMODE(file.stat().st_mode)
    try:
        save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, file, metadata=metadata)
    except SafetensorError as error:
        raise OSError(f"{file}: could not be written ({error})") from None
    file.chmod(mode)
    with file.open("rb") as out:
        os.fsync(out.fileno())
