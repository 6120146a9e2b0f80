"""Arguments as people write them: NAME=VALUE, and a method with its own, `snapkv:observed=32,pool=7`, which stands in
parentheses where it is a value itself, `adakv:eviction=(snapkv:observed=32,pool=7),over=model`."""

import json
import re
from collections.abc import Container, Sequence
from typing import Any

from kvjax.errors import UserError

NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
"""As people write them, and JSON does not: .2 and 2."""


def assignments(texts: Sequence[str], option: str) -> dict[str, Any]:
    """Arguments written as NAME=VALUE: numbers, true, false and lists as in JSON, anything else as text,
    without parentheses around it.

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
        if NUMBER.fullmatch(text):
            return float(text)
        return text[1:-1] if text[0] == "(" and text[-1] == ")" else text


def _between_commas(text: str) -> list[str]:
    """Its parts, where a comma within a list or parentheses stands between none."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


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
    return name, assignments(_between_commas(told), f"{option} {name}:".lstrip())
