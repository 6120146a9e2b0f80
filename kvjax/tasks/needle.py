"""A single record at a chosen depth of the text. Questions of all three types of `recall` ask for it."""

from dataclasses import dataclass

import numpy as np

from kvjax.errors import UserError
from kvjax.tasks.hide import text_slice
from kvjax.tasks.recall import QUESTION_TOKENS, TYPES, mark_record, question
from kvjax.tasks.sample import Sample, Tokens, as_tokens
from kvjax.tasks.vocabulary import Vocabulary


@dataclass(frozen=True)
class Needle:
    """The needle of seed i is at depth `depths[i % len(depths)]`, from 0 (the context's start) to 1 (its end).

    The kind of a question is the depth.
    """

    vocabulary: Vocabulary
    """The special tokens of the task."""
    text: Tokens
    """Source of the filler."""
    depths: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8)
    """Depths of the needle, as shares of the context."""
    name: str = "needle"

    def sample(self, seed: int, length: int) -> Sample:
        v, rng = self.vocabulary, np.random.default_rng((seed, length))
        depth = self.depths[seed % len(self.depths)]
        record = as_tokens(rng.choice(v.ordinary, size=3, replace=False))
        needle = mark_record(v, record)
        n_filler = length - QUESTION_TOKENS - 2 - len(needle)
        if n_filler < 0:
            raise UserError(f"{length} tokens are too few for a needle and its question")
        filler = text_slice(rng, self.text, n_filler)
        at = round(depth * n_filler)
        context = np.concatenate(
            [as_tokens([v.begin]), filler[:at], needle, filler[at:], as_tokens([v.separator])]
        )
        return Sample(context, tuple(question(v, record, i, f"{depth:g}") for i in range(len(TYPES))))
