"""Two documents in one sequence, and each in a sequence of its own."""

import numpy as np
from jaxtyping import Shaped

from kvjax.train.packs import Labelled, natural

FIRST, TOKENS = 13, 32
"""Numbers of tokens of the first document, and of both."""


def rows() -> tuple[Labelled, list[Labelled]]:
    """Return a packed row [1 t], and one row for each document, followed by tokens without labels."""
    tokens = np.random.default_rng(7).integers(0, 61, TOKENS)
    document = np.repeat([0, 1], [FIRST, TOKENS - FIRST])
    separate = []
    for index in (0, 1):
        row = np.concatenate([tokens[document == index], tokens[document != index]])
        labelled_row = natural(0, row, np.zeros_like(row))
        labelled_row["labelled"] &= np.arange(TOKENS) < (document == index).sum()
        separate.append(batch_of(labelled_row))
    return batch_of(natural(0, tokens, document)), separate


def batch_of(row: Labelled) -> dict[str, Shaped[np.ndarray, "1 t"]]:
    return {name: x[None] for name, x in row.items()}


def weighted(losses: list[float], separate: list[Labelled]) -> float:
    """Return the mean of the losses, weighted by the number of labelled tokens in each row."""
    return float(np.average(losses, weights=[row["labelled"].sum() for row in separate]))
