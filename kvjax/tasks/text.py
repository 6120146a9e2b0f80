"""Plain text: what follows a context."""

from dataclasses import dataclass

import numpy as np

from kvjax.tasks.hide import text_slice
from kvjax.tasks.passages import CALIBRATION_SHARE
from kvjax.tasks.sample import Question, Sample, Tokens, as_tokens
from kvjax.tasks.vocabulary import Vocabulary

PARTS = 8
"""The last of so many parts is predicted, token by token, which takes much longer than reading."""
COUNTS_FOR = 12
"""Answers that a text counts for whose end is predicted."""


@dataclass(frozen=True)
class Text:
    """A slice of the text, continued."""

    vocabulary: Vocabulary
    """The marks that the task is written with."""
    text: Tokens
    """Source of the filler."""
    name: str = "text"

    def sample(self, seed: int, length: int) -> Sample:
        rng = np.random.default_rng((seed, length))
        tokens = np.concatenate([as_tokens([self.vocabulary.begin]), text_slice(rng, self.text, length - 1)])
        return continuation(tokens)


def split_text(text: Tokens) -> tuple[Tokens, Tokens]:
    """The text to compare on, and its last quarter, to calibrate on: slices of the one share nothing with slices of the
    other."""
    cut = len(text) - round(CALIBRATION_SHARE * len(text))
    return text[:cut], text[cut:]


def continuation(tokens: Tokens, most: int | None = None) -> Sample:
    """A text whose last eighth is the answer, `most` tokens of it at most, which is given; the one token before it the
    prompt, the rest the context.

    The score is the share of the next tokens that the model says, and that of the full cache's next tokens once these
    are known (`score_agreements`).
    """
    eighth = max(1, len(tokens) // PARTS)
    n_context = len(tokens) - (eighth if most is None else min(eighth, most)) - 1
    prompt, answer = tokens[n_context : n_context + 1], tokens[n_context + 1 :]
    return Sample(tokens[:n_context], (Question(prompt, answer, "text", given=True),))
