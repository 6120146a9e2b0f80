"""A wheel with a GGUF file inside."""

import zipfile
from pathlib import Path

IDS = {"bos_token_id": 1, "eos_token_id": 2}


def wheel_of(folder: Path, *files: str, source: Path) -> Path:
    wheel = folder / "model-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/__init__.py", "")
        for name in files:
            archive.write(source, name)
    return wheel
