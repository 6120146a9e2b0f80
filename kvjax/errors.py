"""The error that a user's mistake raises: one line saying what was given, what was expected, and where."""

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
"""The largest int32, which is the type of whole numbers on devices."""
LARGEST_FLOAT = float.fromhex("0x1.fffffep127")
"""The largest float32."""


LONGEST_LINE = 490
"""The most characters of a message, so that with `error: ` or `warning: ` before it there are fewer than 500."""


def printable(text: str) -> str:
    """Return a text that a terminal shows as it is.

    Everything unprintable except line feeds (control characters, those that change the direction of writing, half
    surrogates) becomes its escape, such as `\\x1b`.
    """
    if text.isprintable():
        return text
    escape = lambda x: x if x.isprintable() or x == "\n" else x.encode("unicode_escape").decode()  # noqa: E731
    return "".join(map(escape, text))


def one_line(text: str) -> str:
    """Return a text as one printable line of at most `LONGEST_LINE` characters.

    The middle of a longer text is left out, since advice stands at the end.
    """
    line = printable(" ".join(text.split()))
    if len(line) <= LONGEST_LINE:
        return line
    half = LONGEST_LINE // 2
    return f"{line[:half]}…{line[half + 1 - LONGEST_LINE :]}"


class UserError(ValueError):
    """Bad input from the user. The message is one line (`one_line`); the command-line programs print it alone and exit
    with 2."""

    def __init__(self, message: object = ""):
        super().__init__(one_line(str(message)))


def warn(message: str, stacklevel: int = 1) -> None:
    """Warn of a request that is valid but probably not intended, in one line (`one_line`). Commands print it alone."""
    warnings.warn(one_line(message), UserWarning, stacklevel=stacklevel + 1)


def shown(value: Any) -> str:
    """Return any value, short and on one line."""
    return one_line(reprlib.repr(value))


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names that are most like one, whatever its case and its dashes; empty if none is."""
    plain = {_letters(own): own for own in known}
    return [plain[own] for own in difflib.get_close_matches(_letters(name), plain)]


def _letters(name: str) -> str:
    return re.sub(r"[\W_]", "", name.lower())


def refuse_unknown(where: str, name: str, known: Sequence[str]) -> NoReturn:
    """Raise the UserError of an argument that `where` does not have. It names all arguments and the nearest ones."""
    near = nearest(name, known)
    best = f"; the nearest: {', '.join(near)}" if near else ""
    raise UserError(f"{where} has no argument {name!r}; it has {', '.join(known) or 'none'}{best}")


def named_arguments(where: str = "") -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a function refuse a keyword argument that it does not have, as `refuse_unknown` does. `where`: the
    function's name in the message, if it is not its own."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        known = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
        called = where or getattr(function, "__name__", "")

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            for name in kwargs:
                if name not in known:
                    refuse_unknown(called, name, known)
            return function(*args, **kwargs)

        return checked

    return decorate


def named_fields(cls: type[T]) -> type[T]:
    """Make a dataclass refuse a keyword argument that is none of its fields, as `named_arguments` does for a
    function."""
    cls.__init__ = named_arguments(where=cls.__name__)(cls.__init__)
    return cls


def whole_number(where: str, name: str, value: Any, least: int = 1, most: int = LARGEST_INT) -> int:
    """Return `value` if it is a whole number in the range; a float or an array of one is accepted, too. `where` begins
    the error message."""
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
    """Return `value` if it is a finite number in the range; an int or an array of one is accepted, too."""
    number = _plain(value)
    if number is None or not (abs(number) <= LARGEST_FLOAT and least <= number <= most and (number > above)):
        limits = (("above", above), ("at least", least), ("at most", most))
        said = [f"{word} {limit:g}" for word, limit in limits if math.isfinite(limit)]
        range_ = f", {' and '.join(said)}" if said else ""
        raise UserError(f"{where}: {name} must be a finite number{range_}, got {shown(value)}")
    return float(number)


def one_of(where: str, name: str, value: Any, known: Sequence[str | bool]) -> None:
    """Raise UserError unless a value is one of the known ones."""
    if not isinstance(value, str | bool) or value not in known:
        raise UserError(f"{where}: {name} is one of {', '.join(map(str, known))}, got {shown(value)}")


def check_unicode(text: str, what: str = "a prompt") -> None:
    """Raise UserError for half of a surrogate pair, which a text read from bytes of another encoding may have."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{what} must be Unicode text, and character {error.start} is none: {shown(text)}"
        ) from None


def _plain(value: Any) -> int | float | None:
    """Return the number, which an array may hold; None if it is no number. A bool is none."""
    value = value.item() if getattr(value, "shape", None) == () else value
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def byte_size(text: str) -> int | None:
    """Return the bytes that a text such as 2GiB or 1.5 GB names; None if it names none."""
    said = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]i?B)", text)
    return None if said is None else int(float(said[1]) * UNITS[said[2]])


def shown_bytes(count: int) -> str:
    """Return a number of bytes with its unit, as 1.50 GiB."""
    for unit in ("GiB", "MiB", "KiB"):
        if abs(count) >= UNITS[unit]:
            return f"{count / UNITS[unit]:.2f} {unit}"
    return f"{count} B"
