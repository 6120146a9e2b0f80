"""Hide short runs of tokens in ordinary text."""

from collections.abc import Sequence

import numpy as np

from kvjax.errors import UserError
from kvjax.tasks.sample import Tokens


def text_slice(rng: np.random.Generator, text: Tokens, length: int) -> Tokens:
    """Return `length` consecutive tokens from a random place of the text. Raises UserError if the text is shorter."""
    if len(text) < length:
        raise UserError(f"the text has {len(text)} tokens, expected at least {length}")
    start = rng.integers(len(text) - length + 1)
    return text[start : start + length]


def hide(rng: np.random.Generator, text: Tokens, length: int, segments: Sequence[Tokens]) -> Tokens:
    """Return `length` tokens: a slice of the text with the segments inserted at random places, in random order.

    Raises `UserError` if the segments are longer than `length`.
    """
    n_filler = length - sum(map(len, segments))
    if n_filler < 0:
        raise UserError(f"{length} tokens are too few to hide {length - n_filler} in")
    filler = text_slice(rng, text, n_filler)
    cuts = np.sort(rng.integers(n_filler + 1, size=len(segments)))
    order = rng.permutation(len(segments))
    between = np.split(filler, cuts)
    pieces = [piece for i, gap in zip(order, between[:-1], strict=True) for piece in (gap, segments[i])]
    return np.concatenate([*pieces, between[-1]])
