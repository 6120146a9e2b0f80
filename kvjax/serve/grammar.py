"""Constraints that make answers follow a JSON schema, by llguidance."""

from collections.abc import Callable
from typing import Any, NamedTuple

import llguidance
import llguidance.hf
import llguidance.numpy
import numpy as np
from jaxtyping import Bool

from kvjax.engine import Constraint
from kvjax.errors import UserError

JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON has the white space of Python's `json`. If any amount were allowed, small models would write nothing else."""
MAX_SCHEMA = 1 << 16
"""The most characters of a JSON schema's grammar."""


class Grammars:
    """Makes constraints for a model's vocabulary.

    Args:
        tokenizer: the model's tokenizer.
        vocabulary: number of the model's logits, which may exceed the number of the tokenizer's tokens.
        ends: tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, ends: tuple[int, ...]):
        self._vocabulary, self._ends = vocabulary, ends
        self._tokens = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=list(ends))

    def schema(self, schema: Any) -> "Format":
        """Return the format of JSON that a schema describes.

        Raises:
            UserError: llguidance has no grammar for the schema.
        """
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=JSON_STYLE)
        except (ValueError, TypeError, RecursionError) as error:
            raise UserError(f"the JSON schema cannot be used ({error})") from None
        if len(grammar) > MAX_SCHEMA:
            raise UserError(f"the JSON schema has more than {MAX_SCHEMA:,} characters")
        if error := llguidance.LLMatcher.validate_grammar(grammar, self._tokens):
            raise UserError(f"the JSON schema cannot be used ({error})")
        return self.format(grammar)

    def format(self, grammar: str) -> "Format":
        """Return the format of a valid llguidance grammar."""
        return Format(
            grammar, lambda: llguidance.LLMatcher(self._tokens, grammar), self._vocabulary, self._ends
        )


class Format(NamedTuple):
    """A format of answers. Calling it returns the constraint of one answer."""

    grammar: str
    """The format as an llguidance grammar."""
    matcher: Callable[[], llguidance.LLMatcher]
    vocabulary: int
    ends: tuple[int, ...]

    def __call__(self) -> Constraint:
        return _Grammar(self.matcher(), self.vocabulary, self.ends)


class _Grammar:
    """The constraint of one answer."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: int, ends: tuple[int, ...]):
        self._matcher, self._vocabulary, self._ends = matcher, vocabulary, ends
        self.error: str | None = None
        self._bits = llguidance.numpy.allocate_token_bitmask(1, vocabulary)

    def allowed(self) -> Bool[np.ndarray, " v"]:
        if self._matcher.is_error():
            self.error = self._matcher.get_error()
        if self._matcher.is_stopped() or self._matcher.is_error():
            allowed = np.zeros(self._vocabulary, bool)
            allowed[list(self._ends)] = True
            return allowed
        llguidance.numpy.fill_next_token_bitmask(self._matcher, self._bits)
        return np.unpackbits(self._bits[0].view(np.uint8), bitorder="little")[: self._vocabulary].astype(bool)

    def take(self, token: int) -> None:
        if self.error is None:
            self._matcher.consume_token(token)
