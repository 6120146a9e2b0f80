"""The packaged model, its test-size sibling, gates and head patterns for it, and a text that neither was trained on."""

from pathlib import Path
from typing import Literal

BUILTIN = "builtin"
"""The name of what comes with the package, where a folder could be named."""
GATES = {BUILTIN: "wgkv"} | {f"{BUILTIN}:{name}": name for name in ("fast_kvzip", "prulong", "duo_attention")}
"""The names of the packaged gates and head patterns, and the methods that they are of."""


def builtin_model(name: Literal["model", "test_model"] = "model") -> Path:
    """The Hugging Face folder of the built-in model or of its test-size sibling."""
    return Path(__file__).parent / name


def builtin_gates(name: str = BUILTIN) -> Path:
    """The folder of the gates of a name in `GATES` for the built-in model, as training exports them."""
    return Path(__file__).parent / "gates" / GATES[name]
