"""Texts and bytes of single tokens, for log-probabilities."""

import functools
import re
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode


class TokenTexts:
    """Texts of a tokenizer's tokens.

    The texts of an answer's tokens add up to the answer's text, except for characters that span several tokens.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    @functools.cached_property
    def special(self) -> frozenset[int]:
        """Special tokens, which are not shown in texts."""
        return frozenset(self._tokenizer.all_special_ids)

    def text(self, token: int, before: int | None) -> str:
        """Return the text that a token adds after the token `before`; None: it is the first token.

        The token before it decides whether a leading space is shown.
        """
        context = [] if before is None or before in self.special else [before]
        return self._tokenizer.decode([*context, token])[len(self._tokenizer.decode(context)) :]

    def bytes(self, token: int, text: str) -> list[int]:
        """Return the bytes of a token with this text. The token may be a part of a character."""
        name = str(self._tokenizer.convert_ids_to_tokens(token))
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", name):
            return [int(byte[1], 16)]
        byte_of = _byte_characters()
        if token not in self.special and "\N{REPLACEMENT CHARACTER}" in text and {*name} <= byte_of.keys():
            return [byte_of[character] for character in name]
        return list(text.encode())


@functools.cache
def _byte_characters() -> dict[str, int]:
    """Return the byte of each character in the vocabularies of byte-level tokenizers (GPT-2's table)."""
    return {character: byte for byte, character in bytes_to_unicode().items()}
