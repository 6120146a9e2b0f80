"""Checked arguments of methods that make the model read texts: token ids, and a tokenizer."""

from collections.abc import Iterable
from typing import Any

from kvjax.errors import UserError, shown, whole_number


def token_ids(method: str, field: str, given: Any) -> tuple[int, ...]:
    """Return the value of a field of token ids as a tuple. Raises UserError if it is not a list of token ids."""
    if isinstance(given, str | bytes | bytearray) or not isinstance(given, Iterable):
        raise UserError(f"{method}: {field} must be a list of token ids, got {shown(given)}")
    return tuple(whole_number(method, f"a token id of {field}", token, 0) for token in given)


def check_tokenizer(method: str, given: Any) -> None:
    """Raise UserError if `given` is not a tokenizer."""
    if not (callable(given) and hasattr(given, "decode")):
        raise UserError(f"{method}: tokenizer must come from kvjax.load_tokenizer, got {shown(given)}")
