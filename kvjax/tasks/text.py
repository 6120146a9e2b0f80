"""Plain text: what follows a context."""

from dataclasses import dataclass

import numpy as np

from kvjax.tasks.hide import text_slice
from kvjax.tasks.passages import CALIBRATION_SHARE
from kvjax.tasks.sample import Question, Sample, Tokens, as_tokens
from kvjax.tasks.vocabulary import Vocabulary

PARTS = 8
"""A text has this many parts, of which the last is predicted, token by token. This takes much longer than reading."""
COUNTS_FOR = 12
"""The number of answers that a text with a predicted end counts for."""


@dataclass(frozen=True)
class Text:
    """A slice of the text whose end is predicted."""

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
    """Return the text to compare on, and its last quarter, to calibrate on. Slices of the one share nothing with slices
    of the other."""
    cut = len(text) - round(CALIBRATION_SHARE * len(text))
    return text[:cut], text[cut:]


def continuation(tokens: Tokens, most: int | None = None) -> Sample:
    """Return a text whose last eighth, at most `most` tokens of it, is the given answer. The one token before it is the
    prompt, the rest the context.

    The score is the share of the next tokens that the model predicts right. Once the full cache's next tokens are
    known, it is the share that agrees with them (`score_agreements`).
    """
    eighth = max(1, len(tokens) // PARTS)
    n_context = len(tokens) - (eighth if most is None else min(eighth, most)) - 1
    prompt, answer = tokens[n_context : n_context + 1], tokens[n_context + 1 :]
    return Sample(tokens[:n_context], (Question(prompt, answer, "text", given=True),))
