"""Plain text, of which the model predicts the end."""

from dataclasses import dataclass

import numpy as np

from kvjax.tasks.hide import text_slice
from kvjax.tasks.passages import CALIBRATION_SHARE
from kvjax.tasks.sample import Question, Sample, Tokens, as_tokens
from kvjax.tasks.vocabulary import Vocabulary

PARTS = 8
"""The model predicts the last of this many parts of a text, token by token, which takes much longer than reading."""
ANSWERS_PER_TEXT = 12
"""The number of answers that a text counts for."""


@dataclass(frozen=True)
class Text:
    """A slice of the text, of which the model predicts the end."""

    vocabulary: Vocabulary
    """The special tokens of the task."""
    text: Tokens
    """Source of the filler."""
    name: str = "text"

    def sample(self, seed: int, length: int) -> Sample:
        rng = np.random.default_rng((seed, length))
        tokens = np.concatenate([as_tokens([self.vocabulary.begin]), text_slice(rng, self.text, length - 1)])
        return continuation(tokens)


def split_text(text: Tokens) -> tuple[Tokens, Tokens]:
    """Return the text to compare on, and its last quarter to calibrate on."""
    cut = len(text) - round(CALIBRATION_SHARE * len(text))
    return text[:cut], text[cut:]


def continuation(tokens: Tokens, most: int | None = None) -> Sample:
    """Return a text as a sample: its last eighth, or at most the last `most` tokens, is the teacher-forced answer.

    The token before the answer is the prompt, the rest is the context. The score is the share of tokens that the model
    predicts right, or the share that agrees with the full cache's predictions (`score_agreements`).
    """
    eighth = max(1, len(tokens) // PARTS)
    n_context = len(tokens) - (eighth if most is None else min(eighth, most)) - 1
    prompt, answer = tokens[n_context : n_context + 1], tokens[n_context + 1 :]
    return Sample(tokens[:n_context], (Question(prompt, answer, "text", teacher_forced=True),))
