"""What a saved cache's folder says of itself: `cache.json`, with a digest of its own."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvjax.errors import UserError, shown

DESCRIPTION = "cache.json"
FORMAT = 1
"""Of the folder; another one is refused."""


def sealed(description: Mapping[str, Any]) -> str:
    """A digest of a description without its own."""
    own = {name: x for name, x in description.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()


def describe_cache(path: str | Path) -> dict[str, Any]:
    """What `cache.json` says: among others "policy", "tokens" of each sequence, "held" entries of each layer and kv
    head, and "bytes" of the arrays.

    Raises UserError if there is none, or one that was changed or is of another version.
    """
    file = Path(path) / DESCRIPTION
    try:
        if not file.is_file():
            raise UserError(f"{path}: no cache is saved here: it has no {DESCRIPTION}")
        found = json.loads(file.read_text(encoding="utf-8"))
        whole = found["sha256"] == sealed(found)
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: damaged ({shown(error)})") from None
    if found.get("format") != FORMAT:
        raise UserError(
            f"{file}: saved in format {found.get('format')} by kvjax {found.get('kvjax')}, this reads {FORMAT}"
        )
    if not whole:
        raise UserError(f"{file}: it was changed since it was written")
    return found
