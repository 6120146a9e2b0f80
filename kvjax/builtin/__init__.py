"""The packaged model, its test-size sibling, write gates for it, and a text that neither was trained on."""

from pathlib import Path
from typing import Literal

BUILTIN = "builtin"
"""The name of what comes with the package, where a folder could be named."""


def builtin_model(name: Literal["model", "test_model"] = "model") -> Path:
    """The Hugging Face folder of the built-in model or of its test-size sibling."""
    return Path(__file__).parent / name


def builtin_gates() -> Path:
    """The folder of WG-KV's write gates for the built-in model, as training exports them."""
    return Path(__file__).parent / "gates"
