"""The KV footprint (PruLong, arXiv:2506.17121, Sec. 2.1 and App. A): entries held, summed over the query steps.

A call runs some tokens over what is held: its first token holds itself beside that, its second one more, and so on. A
prefill chunk is a call, and so is every decoded token. Full causal attention is footprint 1 and peak 1.
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
    """What a kv head (or the mean of several) held, call by call: `held` entries before it, `tokens` in it. `passing`:
    whether the call's tokens were only read to look at others (a chunk's patch, a question that is asked again), and
    are no part of the sequence; None: no call's."""

    held: Float[np.ndarray, " calls"]
    """Entries before each call."""
    tokens: Int[np.ndarray, " calls"]
    """In it."""
    passing: Bool[np.ndarray, " calls"] | None = None
    """Whether they were only read to look."""

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
        """The same with all that was really held: passing tokens and their steps are counted, too."""
        return float(self.totals.sum()) / (self.length * (self.length + 1) / 2)

    @property
    def peak(self) -> float:
        """The most entries at one time, passing ones included, over those of full attention at the end."""
        return float((self.held + self.tokens).max() / self.length)

    @property
    def final(self) -> float:
        """The entries of the last call, before any compaction after it, over those of full attention."""
        return float((self.held + self.tokens)[-1] / self.length)


def call_sizes(prompt: int, output: int, chunk: int) -> Int[np.ndarray, " calls"]:
    """Tokens of each call: a prompt in chunks, then `output` tokens one by one."""
    if prompt < 1 or output < 0 or chunk < 1:
        raise UserError(f"expected prompt ≥ 1, output ≥ 0 and chunk ≥ 1, got {prompt}, {output} and {chunk}")
    whole, rest = divmod(prompt, chunk)
    return np.array([chunk] * whole + [rest] * (rest > 0) + [1] * output)


def occupancy(log: Sequence[Call], sequence: int) -> Occupancy:
    """What a cache really held of one of its sequences, from its first token to its last: the entries of its mean kv
    head. A call was passing if a later one begins at a position that it had reached."""
    if since := int(log[0].seen.max()):
        raise UserError(f"this footprint log begins after {since} tokens: log the context too")
    ran = [call for call in log if call.tokens[sequence]]
    held, seen, tokens = (np.array([x[sequence] for x in column]) for column in zip(*ran, strict=True))
    following = np.minimum.accumulate(np.append(seen, seen[-1] + tokens[-1])[::-1])[::-1]
    return Occupancy(held, tokens, seen + tokens > following[1:])


def streaming_head(prompt: int, output: int, chunk: int, *, sink: int, window: int) -> Occupancy:
    """A head that holds its first `sink` tokens and the last `window` before each call."""
    tokens = call_sizes(prompt, output, chunk)
    before = np.cumsum(tokens) - tokens
    local = np.minimum(before, window)
    return Occupancy((local + np.minimum(before - local, sink)).astype(float), tokens)


def evicting_head(
    prompt: int, output: int, chunk: int, *, share: float = 1.0, observed: int = 64
) -> Occupancy:
    """A head that keeps a `share` of each prefill chunk and, as the paper charges it, `observed` entries more."""
    tokens = call_sizes(prompt, output, chunk)
    prefill = len(tokens) - output
    # half to even, as the paper's code rounds
    stays = np.minimum(np.round(share * tokens).astype(int) + observed, tokens)
    stays[prefill:] = 1
    return Occupancy((np.cumsum(stays) - stays).astype(float), tokens)


def mean_head(parts: Sequence[tuple[float, Occupancy]]) -> Occupancy:
    """The mean head where each share of the heads is of one kind; the shares add up to 1."""
    if abs(sum(share for share, _ in parts) - 1) > 1e-9:
        raise UserError(f"the shares of heads must add up to 1, got {[share for share, _ in parts]}")
    first = parts[0][1]
    if any(
        not np.array_equal(part.tokens, first.tokens) or not np.array_equal(part._own, first._own)
        for _, part in parts
    ):
        raise UserError("heads can only be mixed if they hold entries of the same calls")
    return Occupancy(
        np.sum([share * part.held for share, part in parts], axis=0), first.tokens, first.passing
    )


@dataclass(frozen=True)
class Crossing:
    """Where a sweep crosses a score, or that it does so below its smallest or above its largest footprint."""

    relation: Literal["=", "<", ">"]
    """"=" at the footprint, "<" below it, ">" above it."""
    footprint: float
    """A share of full attention's."""

    def __str__(self) -> str:
        return f"{'' if self.relation == '=' else self.relation}{100 * self.footprint:.0f}%"


def critical_footprint(points: Sequence[tuple[float, float]], full: float, share: float = 0.9) -> Crossing:
    """The smallest footprint at which a method keeps `share` of the score of full attention (Sec. 2.1).

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
