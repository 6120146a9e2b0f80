"""Helpers of the documents' tests: texts whose terms occur nowhere else, and samples of them."""

import numpy as np

from kvjax.builtin import builtin_model
from kvjax.tasks.ruler.words import ADJECTIVES, NOUNS
from kvjax.tasks.splits import Split
from kvjax.tasks.suite import Inputs

LENGTH = 700
COMPARED = Split(7, 5)


def paragraph_text(seed: int, paragraphs: int) -> str:
    """Return paragraphs of three wrapped sentences, of which two have a name that occurs nowhere else."""
    rng, text = np.random.default_rng(seed), []
    for index in range(paragraphs):
        sentences = []
        for line in range(3):
            a, b = (ADJECTIVES[i] for i in rng.integers(len(ADJECTIVES), size=2))
            noun = NOUNS[rng.integers(len(NOUNS))]
            term = f"Guild{seed}x{index}x{line}" if line else "the others"
            sentences.append(
                f"In the {a} year of the {noun} that was {b} they gave it\n    to {term}, and left."
            )
        text.append(" ".join(sentences))
    return "\n\n".join(text) + "\n"


def inputs(**data):
    return Inputs(str(builtin_model()), data)
