"""The packaged model, its test-size sibling and a text that neither was trained on."""

from pathlib import Path
from typing import Literal


def builtin_model(name: Literal["model", "test_model"] = "model") -> Path:
    """The Hugging Face folder of the built-in model or of its test-size sibling."""
    return Path(__file__).parent / name
