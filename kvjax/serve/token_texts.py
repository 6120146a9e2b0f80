"""Texts and bytes of single tokens, for log-probabilities."""

import functools
import re
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode


class TokenTexts:
    """Texts of a tokenizer's tokens. Those of an answer's tokens, one after another, make up its text, but for
    characters of several tokens."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    @functools.cached_property
    def special(self) -> frozenset[int]:
        """Tokens that texts do not show."""
        return frozenset(self._tokenizer.all_special_ids)

    def text(self, token: int, before: int | None) -> str:
        """Return the text that a token adds after another one, which decides whether a space is shown; None: it is the
        first."""
        first = [] if before is None or before in self.special else [before]
        return self._tokenizer.decode([*first, token])[len(self._tokenizer.decode(first)) :]

    def bytes(self, token: int, text: str) -> list[int]:
        """Return the bytes of a token with this text, also of one that is a part of a character."""
        name = str(self._tokenizer.convert_ids_to_tokens(token))
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", name):
            return [int(byte[1], 16)]
        known = _byte_characters()
        if token not in self.special and "\N{REPLACEMENT CHARACTER}" in text and {*name} <= known.keys():
            return [known[character] for character in name]
        return list(text.encode())


@functools.cache
def _byte_characters() -> dict[str, int]:
    """Return the bytes that characters stand for in the vocabularies of byte-level tokenizers (GPT-2's table)."""
    return {character: byte for byte, character in bytes_to_unicode().items()}
