"""The token ids of tasks for the built-in model: pieces of text, and special tokens that mark parts of a sample."""

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
"""Special tokens of the built-in tokenizer, in the order of their ids, which follow the ordinary tokens."""


@dataclass(frozen=True)
class Vocabulary:
    """Token ids of the tasks. Ids below `ordinary` are pieces of text, the others are special tokens."""

    ordinary: int
    """The number of tokens that are pieces of text."""
    begin: int
    """Begins a sequence."""
    end: int
    """Ends a file of the packaged text, and pads a training sequence."""
    record: int
    """Begins a record."""
    separator: int
    """Separates the context from the questions."""
    question: int
    """Begins a question."""
    types: tuple[int, int, int]
    """The three types of questions about a record."""
    copy: int
    """Begins a passage to be copied."""
    token_bytes: np.ndarray
    """The number of UTF-8 bytes of each ordinary token."""

    @classmethod
    def from_tokenizer(cls, tokenizer: "Tokenizer") -> "Vocabulary":
        """Read the ids from a byte-level tokenizer that has `SPECIAL_TOKENS`.

        Raises UserError, naming the missing tokens, if it lacks some.
        """
        all_ids = tokenizer.get_vocab()
        missing = [token for token in SPECIAL_TOKENS if token not in all_ids]
        if missing:
            raise UserError(
                f"the built-in tasks need the built-in tokenizer; this one has no {', '.join(missing)}"
            )
        ids = {token: all_ids[token] for token in SPECIAL_TOKENS}
        ordinary = min(ids.values())
        # in a byte-level vocabulary, every character of a token stands for one byte
        token_bytes = np.zeros(ordinary, np.int32)
        for token, i in all_ids.items():
            if i < ordinary:
                token_bytes[i] = len(token)
        return cls(
            ordinary=ordinary,
            begin=ids["<|begin|>"],
            end=ids["<|end|>"],
            record=ids["<|record|>"],
            separator=ids["<|separator|>"],
            question=ids["<|question|>"],
            types=(ids["<|F|>"], ids["<|S|>"], ids["<|R|>"]),
            copy=ids["<|copy|>"],
            token_bytes=token_bytes,
        )

    def bytes_of(self, tokens: np.ndarray) -> int:
        """Return the number of UTF-8 bytes of the tokens' text. Special tokens have none."""
        return int(self.token_bytes[tokens[tokens < self.ordinary]].sum())
