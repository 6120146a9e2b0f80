"""The error that a user's mistake raises: one line saying what was given, what was expected, and where."""

import math
import re
import reprlib
from collections.abc import Sequence
from typing import Any

LARGEST_INT = 2**31 - 1
"""Of int32, which is what whole numbers are on devices."""
LARGEST_FLOAT = float.fromhex("0x1.fffffep127")
"""Of float32."""


class UserError(ValueError):
    """Bad input from the user. The message is one line; the command-line programs print it alone and exit with 2."""


class Doubt(UserWarning):
    """What is run as it was told, though it may not be what the user meant. The message is one line, which the
    command-line programs print alone."""


def shown(value: Any) -> str:
    """Any value, short and on one line."""
    return " ".join(reprlib.repr(value).split())


def whole_number(where: str, name: str, value: Any, least: int = 1, most: int = LARGEST_INT) -> int:
    """`value` if it is a whole number in the range, also as a float or an array of one; `where` says whose it is."""
    number = _plain(value)
    if number is None or number % 1 or not least <= number <= most:
        limit = f"at most {most}" if number is not None and number > most else f"at least {least}"
        raise UserError(f"{where}: {name} must be a whole number of {limit}, got {shown(value)}")
    return int(number)


def real_number(
    where: str,
    name: str,
    value: Any,
    least: float = -math.inf,
    most: float = math.inf,
    *,
    above: float = -math.inf,
) -> float:
    """`value` if it is a finite number in the range, also as an int or an array of one."""
    number = _plain(value)
    if number is None or not (abs(number) <= LARGEST_FLOAT and least <= number <= most and (number > above)):
        limits = (("above", above), ("at least", least), ("at most", most))
        said = [f"{word} {limit:g}" for word, limit in limits if math.isfinite(limit)]
        range_ = f", {' and '.join(said)}" if said else ""
        raise UserError(f"{where}: {name} must be a finite number{range_}, got {shown(value)}")
    return float(number)


def one_of(where: str, name: str, value: Any, known: Sequence[str | bool]) -> None:
    """Refuse what is not known."""
    if not isinstance(value, str | bool) or value not in known:
        raise UserError(f"{where}: {name} is one of {', '.join(map(str, known))}, got {shown(value)}")


def _plain(value: Any) -> int | float | None:
    """The number, which an array may hold; None if it is none. True is none."""
    value = value.item() if getattr(value, "shape", None) == () else value
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def byte_size(text: str) -> int | None:
    """The bytes that a text such as 2GiB or 1.5 GB names; None: it names none."""
    said = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]i?B)", text)
    return None if said is None else int(float(said[1]) * UNITS[said[2]])
