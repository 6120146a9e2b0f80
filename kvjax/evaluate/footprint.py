"""The KV footprint (PruLong, arXiv:2506.17121, Sec. 2.1 and App. A): entries held, summed over the query steps.

A call of the model is a prefill chunk or a decoded token. Each of its tokens adds one entry to those held before the
call. Full causal attention has footprint 1 and peak 1.
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
    """Entries held by a kv head (or the mean over several), call by call."""

    held: Float[np.ndarray, " calls"]
    """Entries before each call."""
    tokens: Int[np.ndarray, " calls"]
    """Tokens of each call."""
    temporary: Bool[np.ndarray, " calls"] | None = None
    """True for calls whose tokens were only read to observe others (a chunk's patch, a question that is asked again)
    and were then removed; None if there are none."""

    @property
    def _permanent(self) -> Bool[np.ndarray, " calls"]:
        """True for calls whose tokens stay in the sequence."""
        return np.ones(len(self.tokens), bool) if self.temporary is None else ~self.temporary

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return int(self.tokens[self._permanent].sum())

    @property
    def totals(self) -> Float[np.ndarray, " calls"]:
        """Entries summed over the query steps of each call."""
        return self.tokens * (self.tokens + 1) / 2 + self.held * self.tokens

    @property
    def total(self) -> float:
        """Entries summed over the query steps, as in the paper, where temporary tokens and their steps are free."""
        return float(self.totals[self._permanent].sum())

    @property
    def footprint(self) -> float:
        """The total relative to full attention."""
        return self.total / (self.length * (self.length + 1) / 2)

    @property
    def footprint_held(self) -> float:
        """The footprint with temporary tokens and their steps."""
        return float(self.totals.sum()) / (self.length * (self.length + 1) / 2)

    @property
    def peak(self) -> float:
        """The most entries at one time, temporary ones included, relative to full attention at the end."""
        return float((self.held + self.tokens).max() / self.length)


def occupancy(log: Sequence[Call], sequence: int) -> Occupancy:
    """Return the entries held for a sequence, from its first token to its last, as the mean over kv heads.

    A call was temporary if a later call begins before its end.
    """
    if skipped := int(log[0].seen.max()):
        raise UserError(f"this footprint log begins after {skipped} tokens: log the context too")
    calls = [call for call in log if call.tokens[sequence]]
    held, seen, tokens = (np.array([x[sequence] for x in column]) for column in zip(*calls, strict=True))
    following = np.minimum.accumulate(np.append(seen, seen[-1] + tokens[-1])[::-1])[::-1]
    return Occupancy(held, tokens, seen + tokens > following[1:])


@dataclass(frozen=True)
class Crossing:
    """The footprint at which a sweep crosses a score, or a bound if it lies outside the measured footprints."""

    relation: Literal["=", "<", ">"]
    """"=" for a crossing at the footprint, "<" below it, ">" above it."""
    footprint: float
    """Relative to full attention."""

    def __str__(self) -> str:
        return f"{'' if self.relation == '=' else self.relation}{100 * self.footprint:.0f}%"


def critical_footprint(points: Sequence[tuple[float, float]], full: float, share: float = 0.9) -> Crossing:
    """Return the smallest footprint at which a method keeps `share` of the score of full attention (Sec. 2.1).

    Args:
        points: (footprint, score) of a method's sweep, in any order; the score is interpolated linearly between them.
        full: the score of full attention.
    """
    if not points:
        raise UserError("a critical footprint needs at least one measured point")
    points, target = sorted(points), share * full
    first = next((i for i, (_, score) in enumerate(points) if score >= target), None)
    if first is None:
        return Crossing(">", points[-1][0])
    if first == 0:
        return Crossing("<", points[0][0])
    (low, below), (high, above) = points[first - 1 : first + 1]
    return Crossing("=", low + (target - below) / (above - below) * (high - low))
