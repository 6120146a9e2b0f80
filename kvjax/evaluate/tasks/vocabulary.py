"""The token ids that tasks are written in: ordinary pieces of text and the marks around what is hidden."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvjax.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL_TOKENS = (
    "<|begin|>",
    "<|end|>",
    "<|record|>",
    "<|separator|>",
    "<|question|>",
    "<|F|>",
    "<|S|>",
    "<|R|>",
    "<|copy|>",
)
"""Marks of the built-in tokenizer, in the order of their ids after the ordinary tokens."""


@dataclass(frozen=True)
class Vocabulary:
    """Ids 0 … ordinary - 1 are pieces of text, the others marks.

    `token_bytes[i]` is the number of UTF-8 bytes of ordinary token i.
    """

    ordinary: int
    begin: int
    end: int
    record: int
    separator: int
    question: int
    types: tuple[int, int, int]
    copy: int
    token_bytes: np.ndarray

    @classmethod
    def from_tokenizer(cls, tokenizer: "Tokenizer") -> "Vocabulary":
        """Reads the ids from a byte-level tokenizer that has `SPECIAL_TOKENS`.

        Raises `UserError` naming those that are missing.
        """
        ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
        missing = [token for token, i in ids.items() if i is None]
        if missing:
            raise UserError(
                f"the built-in tasks need the built-in tokenizer; this one has no {', '.join(missing)}"
            )
        ordinary = min(ids.values())
        # In a byte-level vocabulary every character of a token stands for one byte.
        pieces = [tokenizer.id_to_token(i) for i in range(ordinary)]
        return cls(
            ordinary=ordinary,
            begin=ids["<|begin|>"],
            end=ids["<|end|>"],
            record=ids["<|record|>"],
            separator=ids["<|separator|>"],
            question=ids["<|question|>"],
            types=(ids["<|F|>"], ids["<|S|>"], ids["<|R|>"]),
            copy=ids["<|copy|>"],
            token_bytes=np.array([len(piece) for piece in pieces], np.int32),
        )

    def bytes_of(self, tokens: np.ndarray) -> int:
        """UTF-8 bytes of the text that the tokens stand for; marks count none."""
        return int(self.token_bytes[tokens[tokens < self.ordinary]].sum())
