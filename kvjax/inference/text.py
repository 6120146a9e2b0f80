"""The text of answers: as it grows, and the texts that end it. The host looks for them between blocks."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from kvjax.errors import UserError, shown


def stop_tokens_of(stop: Sequence[str], tokenizer: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Split stop texts into texts to look for and the ids of those that are tokens of the tokenizer's own (`</s>`).
    Raises UserError for texts without a tokenizer."""
    if stop and tokenizer is None:
        raise UserError(
            f"sampling: stop={shown(list(stop))} needs a tokenizer: stop_token_ids are stop tokens by their ids"
        )
    own = tokenizer.get_added_vocab() if stop else {}
    return tuple(x for x in stop if x not in own), tuple(own[x] for x in stop if x in own)


def stop_place(text: str, stop: Sequence[str]) -> int | None:
    """Return where the first stop text begins; None where there is none."""
    return min((place for one in stop if (place := text.find(one)) >= 0), default=None)


def final_length(text: str, stop: Sequence[str]) -> int:
    """Return how many characters of a text cannot be the beginning of a stop text, whatever follows."""
    starts = (text[-size:] for one in stop for size in range(1, len(one)) if text.endswith(one[:size]))
    return len(text) - max(map(len, starts), default=0)


def cut(tokens: Int[np.ndarray, " t"], tokenizer: Any, stop: Sequence[str]) -> tuple[int, str] | None:
    """Return how many tokens of an answer lie before the first stop text, and the text before it; None where there is
    none."""
    place = stop_place(text := decoded(tokenizer, tokens), stop) if stop else None
    if place is None:
        return None
    text, count = text[:place], len(tokens)
    while not text.startswith(decoded(tokenizer, tokens[:count])):
        count -= 1
    return count, text


def decoded(tokenizer: Any, tokens: Sequence[int] | Int[np.ndarray, " t"]) -> str:
    """Return an answer's text."""
    return tokenizer.decode(tokens, skip_special_tokens=True)


class LiveText:
    """An answer's text as it grows, without what may be half a character or the beginning of a stop text."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]):
        self._tokenizer, self._stop = tokenizer, stop_tokens_of(stop, tokenizer)[0]
        self._tokens: list[int] = []
        self._shown = ""

    def more(self, tokens: Sequence[int]) -> str:
        """Return what can be shown now that these tokens have come."""
        self._tokens += tokens
        # a character may still lack bytes that the next tokens bring
        text = decoded(self._tokenizer, self._tokens).rstrip("\N{REPLACEMENT CHARACTER}")
        place = stop_place(text, self._stop)
        return self.rest(text[: final_length(text, self._stop) if place is None else place])

    def rest(self, text: str) -> str:
        """Return what was not shown yet of `text`, the whole answer or its beginning."""
        if not text.startswith(self._shown):
            return ""
        new, self._shown = text[len(self._shown) :], text
        return new

    def end(self) -> str:
        """Return what was held back, once no more tokens come."""
        text = decoded(self._tokenizer, self._tokens)
        place = stop_place(text, self._stop)
        return self.rest(text if place is None else text[:place])
