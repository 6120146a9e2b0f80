"""Two documents in one sequence, and each in a sequence of its own."""

import numpy as np
from jaxtyping import Shaped

from kvjax.train.packs import Labelled, natural

FIRST, TOKENS = 13, 32
"""Tokens of the first document, and of both."""


def rows() -> tuple[Labelled, list[Labelled]]:
    """A packed row, [1 t], and one of each document, before tokens of which none is learned."""
    tokens = np.random.default_rng(7).integers(0, 61, TOKENS)
    document = np.repeat([0, 1], [FIRST, TOKENS - FIRST])
    alone = []
    for own in (0, 1):
        row = np.concatenate([tokens[document == own], tokens[document != own]])
        made = natural(0, row, np.zeros_like(row))
        made["labelled"] &= np.arange(TOKENS) < (document == own).sum()
        alone.append(batch_of(made))
    return batch_of(natural(0, tokens, document)), alone


def batch_of(row: Labelled) -> dict[str, Shaped[np.ndarray, "1 t"]]:
    return {name: x[None] for name, x in row.items()}


def weighted(losses: list[float], alone: list[Labelled]) -> float:
    """The mean of the losses by how many tokens each row learns."""
    return float(np.average(losses, weights=[row["labelled"].sum() for row in alone]))
