"""Arguments as people write them: NAME=VALUE, and a method with its own, `snapkv:observed=32,pool=7`."""

import json
import re
from collections.abc import Container, Sequence
from typing import Any

from kvjax.errors import UserError

COMMA = re.compile(r",(?![^\[]*\])")
"""Between arguments, and not within a list."""
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
"""As people write them, and JSON does not: .2 and 2."""


def assignments(texts: Sequence[str], option: str) -> dict[str, Any]:
    """Arguments written as NAME=VALUE: numbers, true, false and lists as in JSON, anything else as text.

    Raises UserError for one without a name or a value, and for a name given twice.
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name.isidentifier() or not equals or not value:
            raise UserError(f"{option} {text}: expected NAME=VALUE")
        if name in found:
            raise UserError(f"{option} gives {name} twice")
        found[name] = _value(value)
    return found


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return float(text) if NUMBER.fullmatch(text) else text


def with_arguments(text: str, known: Container[str], option: str = "") -> tuple[str, dict[str, Any] | None]:
    """A name and the arguments behind it: `snapkv:observed=32,pool=7`; None: there is no colon for any.

    A name that is not `known` may be another package's `package.module:NAME`, which has a colon of its own. `option`
    says where it was written. Raises UserError for arguments that are not NAME=VALUE.
    """
    name, colon, told = text.partition(":")
    if name not in known and (brought := re.fullmatch(r"([\w.]+:\w+)(?:(:)(.*))?", text)):
        name, colon, told = (part or "" for part in brought.groups())
    if not colon:
        return name, None
    return name, assignments(COMMA.split(told), f"{option} {name}:".lstrip())
