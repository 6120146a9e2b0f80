"""The KV footprint (PruLong, arXiv:2506.17121, Sec. 2.1 and App. A): entries held, summed over the query steps.

A call runs some tokens over the entries held. Its first token adds its own entry, its second one more, and so on. A
prefill chunk is a call, and so is every decoded token. Full causal attention has footprint 1 and peak 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from kvjax.errors import UserError
from kvjax.inference.footprint_log import Call


@dataclass(frozen=True)
class Occupancy:
    """Entries held by a kv head (or the mean of several), call by call."""

    held: Float[np.ndarray, " calls"]
    """Entries before each call."""
    tokens: Int[np.ndarray, " calls"]
    """Tokens of each call."""
    passing: Bool[np.ndarray, " calls"] | None = None
    """True for calls whose tokens were only read to observe others (a chunk's patch, a question that is asked again)
    and are not part of the sequence; None if there are none."""

    @property
    def _own(self) -> Bool[np.ndarray, " calls"]:
        """The calls of the sequence's own tokens."""
        return np.ones(len(self.tokens), bool) if self.passing is None else ~self.passing

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return int(self.tokens[self._own].sum())

    @property
    def totals(self) -> Float[np.ndarray, " calls"]:
        """Entries summed over the query steps of each call."""
        return self.tokens * (self.tokens + 1) / 2 + self.held * self.tokens

    @property
    def total(self) -> float:
        """Entries summed over the query steps, as the paper charges them: passing tokens and their steps are free."""
        return float(self.totals[self._own].sum())

    @property
    def footprint(self) -> float:
        """The total over that of full attention."""
        return self.total / (self.length * (self.length + 1) / 2)

    @property
    def footprint_held(self) -> float:
        """The footprint of all entries that were really held, with passing tokens and their steps."""
        return float(self.totals.sum()) / (self.length * (self.length + 1) / 2)

    @property
    def peak(self) -> float:
        """The most entries at one time, passing ones included, over those of full attention at the end."""
        return float((self.held + self.tokens).max() / self.length)


def occupancy(log: Sequence[Call], sequence: int) -> Occupancy:
    """Return the entries that a cache held of one of its sequences, from its first token to its last, as the mean over
    kv heads. A call was passing if a later one begins before its end."""
    if since := int(log[0].seen.max()):
        raise UserError(f"this footprint log begins after {since} tokens: log the context too")
    ran = [call for call in log if call.tokens[sequence]]
    held, seen, tokens = (np.array([x[sequence] for x in column]) for column in zip(*ran, strict=True))
    following = np.minimum.accumulate(np.append(seen, seen[-1] + tokens[-1])[::-1])[::-1]
    return Occupancy(held, tokens, seen + tokens > following[1:])


@dataclass(frozen=True)
class Crossing:
    """The footprint at which a sweep crosses a score, or a bound if it does so outside the footprints measured."""

    relation: Literal["=", "<", ">"]
    """"=" at the footprint, "<" below it, ">" above it."""
    footprint: float
    """A share of full attention's."""

    def __str__(self) -> str:
        return f"{'' if self.relation == '=' else self.relation}{100 * self.footprint:.0f}%"


def critical_footprint(points: Sequence[tuple[float, float]], full: float, share: float = 0.9) -> Crossing:
    """Return the smallest footprint at which a method keeps `share` of the score of full attention (Sec. 2.1).

    Args:
        points: (footprint, score) of a sweep of one method, in any order; between them the score is a straight line.
        full: the score of full attention.
    """
    if not points:
        raise UserError("a critical footprint needs at least one measured point")
    points, wanted = sorted(points), share * full
    first = next((i for i, (_, score) in enumerate(points) if score >= wanted), None)
    if first is None:
        return Crossing(">", points[-1][0])
    if first == 0:
        return Crossing("<", points[0][0])
    (low, below), (high, above) = points[first - 1 : first + 1]
    return Crossing("=", low + (wanted - below) / (above - below) * (high - low))
