"""Texts that end an answer: looked for on the host, between blocks."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from kvjax.errors import UserError, shown


def checked_stop(stop: Any) -> tuple[str, ...]:
    """The texts that the user named. Raises UserError for what is no list of texts."""
    if isinstance(stop, str) or not isinstance(stop, Iterable | None):
        raise UserError(f"sample: stop must be a list of texts, got {shown(stop)}")
    texts = tuple(stop or ())
    if not all(isinstance(text, str) and text for text in texts):
        raise UserError(f"sample: stop must be a list of texts, none empty, got {shown(list(texts))}")
    return texts


def stop_texts(stop: Any, tokenizer: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The texts that the user named, and the ids of those that are tokens of the tokenizer's own (`</s>`): these end
    an answer as stop tokens do. Raises UserError for what is no list of texts, and without a tokenizer."""
    texts = checked_stop(stop)
    if texts and tokenizer is None:
        raise UserError(
            f"sample: stop={shown(list(texts))} needs tokenizer=: eos are the stop tokens by their ids"
        )
    own = tokenizer.get_added_vocab() if texts else {}
    return tuple(x for x in texts if x not in own), tuple(own[x] for x in texts if x in own)


def stop_place(text: str, stop: Sequence[str]) -> int | None:
    """Where the first of the texts begins; None: there is none."""
    return min((place for one in stop if (place := text.find(one)) >= 0), default=None)


def settled(text: str, stop: Sequence[str]) -> int:
    """The characters of a text that are no beginning of a stop text, whatever follows."""
    starts = (text[-size:] for one in stop for size in range(1, len(one)) if text.endswith(one[:size]))
    return len(text) - max(map(len, starts), default=0)


def cut(tokens: Int[np.ndarray, " t"], tokenizer: Any, stop: Sequence[str]) -> tuple[int, str] | None:
    """The tokens of an answer that lie before the first stop text, how many, and the text before it; None: there is
    none."""
    place = stop_place(text := decoded(tokenizer, tokens), stop) if stop else None
    if place is None:
        return None
    text, count = text[:place], len(tokens)
    while not text.startswith(decoded(tokenizer, tokens[:count])):
        count -= 1
    return count, text


def decoded(tokenizer: Any, tokens: Sequence[int] | Int[np.ndarray, " t"]) -> str:
    """An answer's text."""
    return tokenizer.decode(tokens, skip_special_tokens=True)


@dataclasses.dataclass
class Watch:
    """Answers as they grow, and which of them have a stop text."""

    tokenizer: Any
    """Of the answers' tokens."""
    stop: Sequence[str]
    """The texts."""
    answers: list[np.ndarray] = dataclasses.field(default_factory=list)
    """Their tokens so far."""

    def ended(self, parts: Sequence[Int[np.ndarray, " _"]]) -> Bool[np.ndarray, " b"]:
        """Which answers have ended with these tokens more."""
        before = self.answers or [part[:0] for part in parts]
        self.answers = [np.concatenate(pair) for pair in zip(before, parts, strict=True)]
        return np.array([cut(answer, self.tokenizer, self.stop) is not None for answer in self.answers])
