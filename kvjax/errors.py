"""Errors and warnings for users. A message is one line that says where something is wrong, what it is, and what was
expected."""

import difflib
import functools
import inspect
import math
import re
import reprlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

LARGEST_INT = 2**31 - 1
"""The largest int32, the type of integers on devices."""
LARGEST_FLOAT = float.fromhex("0x1.fffffep127")
"""The largest float32."""
LONGEST_LINE = 490
"""The maximum characters of a message. With `error: ` or `warning: ` a line has fewer than 500."""


def printable(text: str) -> str:
    """Return a text with unprintable characters replaced by their escapes, such as `\\x1b`.

    These are control characters other than line feeds, characters that change the direction of writing, and half
    surrogates.
    """
    if text.isprintable():
        return text
    escape = lambda x: x if x.isprintable() or x == "\n" else x.encode("unicode_escape").decode()  # noqa: E731
    return "".join(map(escape, text))


def one_line(text: str) -> str:
    """Return a text as one printable line of at most `LONGEST_LINE` characters.

    The middle of a longer text is cut out, since advice comes at the end.
    """
    line = printable(" ".join(text.split()))
    if len(line) <= LONGEST_LINE:
        return line
    half = LONGEST_LINE // 2
    return f"{line[:half]}…{line[half + 1 - LONGEST_LINE :]}"


class UserError(ValueError):
    """An error that the user can fix. The message is one line (`one_line`). Commands print it without a traceback and
    exit with code 2."""

    def __init__(self, message: object = ""):
        super().__init__(one_line(str(message)))


def warn(message: str, stacklevel: int = 1) -> None:
    """Warn about a valid request that is probably not intended, in one line (`one_line`)."""
    warnings.warn(one_line(message), UserWarning, stacklevel=stacklevel + 1)


def shown(value: Any) -> str:
    """Return the `repr` of any value, shortened to one line."""
    return one_line(reprlib.repr(value))


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names that are similar to a name, regardless of case and punctuation."""
    by_letters = {_letters(known_name): known_name for known_name in known}
    return [by_letters[match] for match in difflib.get_close_matches(_letters(name), by_letters)]


def _letters(name: str) -> str:
    return re.sub(r"[\W_]", "", name.lower())


def refuse_unknown(where: str, name: str, known: Sequence[str]) -> NoReturn:
    """Raise UserError for an unknown argument of `where`. The message has all arguments and the nearest ones."""
    near = nearest(name, known)
    advice = f"; the nearest: {', '.join(near)}" if near else ""
    raise UserError(f"{where} has no argument {name!r}; it has {', '.join(known) or 'none'}{advice}")


def named_arguments(where: str = "") -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function to refuse unknown keyword arguments (`refuse_unknown`). `where`: the function's name in the
    message, by default its `__name__`."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        known = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
        label = where or getattr(function, "__name__", "")

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            for name in kwargs:
                if name not in known:
                    refuse_unknown(label, name, known)
            return function(*args, **kwargs)

        return checked

    return decorate


def named_fields(cls: type[T]) -> type[T]:
    """Decorate a dataclass to refuse unknown keyword arguments (`named_arguments`)."""
    cls.__init__ = named_arguments(where=cls.__name__)(cls.__init__)
    return cls


def whole_number(where: str, name: str, value: Any, least: int = 1, most: int = LARGEST_INT) -> int:
    """Return `value` as an int. It may also be a float or an array with one whole number. `where` begins the message.

    Raises UserError if it is not a whole number in the range.
    """
    number = _number(value)
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
    """Return `value` as a float. It may also be an int or an array with one number. `where` begins the message.

    Raises UserError if it is not a finite number in the range.
    """
    number = _number(value)
    if number is None or not (abs(number) <= LARGEST_FLOAT and least <= number <= most and (number > above)):
        limits = (("above", above), ("at least", least), ("at most", most))
        bounds = [f"{word} {limit:g}" for word, limit in limits if math.isfinite(limit)]
        range_ = f", {' and '.join(bounds)}" if bounds else ""
        raise UserError(f"{where}: {name} must be a finite number{range_}, got {shown(value)}")
    return float(number)


def one_of(where: str, name: str, value: Any, known: Sequence[str | bool]) -> None:
    """Raise UserError unless a value is one of the known values."""
    if not isinstance(value, str | bool) or value not in known:
        raise UserError(f"{where}: {name} is one of {', '.join(map(str, known))}, got {shown(value)}")


def check_unicode(text: str, subject: str = "a prompt") -> None:
    """Raise UserError if a text has half of a surrogate pair, as after decoding bytes with the wrong encoding."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{subject} must be Unicode text, but character {error.start} is not: {shown(text)}"
        ) from None


def _number(value: Any) -> int | float | None:
    """Return a number, which may be in an array without axes; None if the value is not a number. A bool is not a
    number."""
    value = value.item() if getattr(value, "shape", None) == () else value
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


BYTE_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def byte_size(text: str) -> int | None:
    """Return the bytes of a size such as 2GiB or 1.5 GB; None if the text is not a size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]i?B)", text)
    return None if match is None else int(float(match[1]) * BYTE_UNITS[match[2]])


def shown_bytes(count: int) -> str:
    """Return a number of bytes with a unit, such as 1.50 GiB."""
    for unit in ("GiB", "MiB", "KiB"):
        if abs(count) >= BYTE_UNITS[unit]:
            return f"{count / BYTE_UNITS[unit]:.2f} {unit}"
    return f"{count} B"
