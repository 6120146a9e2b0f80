"""Formats that answers have to follow, by llguidance: which tokens may come next, given those so far."""

from collections.abc import Callable
from typing import Any, NamedTuple

import llguidance
import llguidance.hf
import llguidance.numpy
import numpy as np
from jaxtyping import Bool

from kvjax.engine import Constraint
from kvjax.errors import UserError

FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON is written as Python's json does: where any white space may come, small models write nothing else."""
LONGEST = 1 << 16
"""Characters of a JSON schema."""


class Grammars:
    """Makes constraints for a model's vocabulary.

    Args:
        tokenizer: the model's.
        vocabulary: the number of the model's logits, which may be more than the tokenizer has tokens.
        ends: the tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, ends: tuple[int, ...]):
        self._vocabulary, self._ends = vocabulary, ends
        self._tokens = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=list(ends))

    def schema(self, schema: Any) -> "Format":
        """Return the format of JSON of this schema.

        Raises:
            UserError: a schema that is none, or that llguidance has no grammar for.
        """
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=FORM)
        except (ValueError, TypeError, RecursionError) as error:
            raise UserError(f"the JSON schema cannot be used ({error})") from None
        if len(grammar) > LONGEST:
            raise UserError(f"the JSON schema has more than {LONGEST:,} characters")
        if error := llguidance.LLMatcher.validate_grammar(grammar, self._tokens):
            raise UserError(f"the JSON schema cannot be used ({error})")
        return self.format(grammar)

    def format(self, grammar: str) -> "Format":
        """Return the format of a grammar of llguidance's that is known to be valid."""
        return Format(
            grammar, lambda: llguidance.LLMatcher(self._tokens, grammar), self._vocabulary, self._ends
        )


class Format(NamedTuple):
    """A format that answers may have to follow; calling it makes the constraint of one answer."""

    grammar: str
    """llguidance's description of it."""
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
