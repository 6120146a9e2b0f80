"""Budgets: how many entries a compaction keeps, and how layers and heads share them.

Numbers are computed on the host, in whole entries and without rounding errors. They reach the device as arrays, so that
one compiled program serves all budgets.
"""

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int

from kvjax.errors import UserError, byte_size, named_fields, one_of, real_number, shown, whole_number
from kvjax.struct import assign, short
from kvjax.topk import OVER

UNLIMITED = 2**62
"""A limit above the entries or bytes of any context."""


class Budget(abc.ABC):
    """The amount of a context that a compaction keeps."""

    proportional: ClassVar[bool] = False
    """True if more tokens always leave more entries, without a limit."""

    @property
    def floor(self) -> float:
        """The least score that stays: entries with a lower score are dropped, however many that leaves."""
        return -math.inf

    @abc.abstractmethod
    def of(self, tokens: int, entry_bytes: int) -> float:
        """Return the entries of a kv head on average for a context of `tokens` tokens, not yet rounded to whole ones.

        `entry_bytes`: the bytes of one token's key and value in all layers and heads.
        """

    def __repr__(self) -> str:
        return short(self)


@named_fields
@dataclass(frozen=True, repr=False)
class Ratio(Budget):
    """A share of a context's entries, above 0 and at most 1."""

    proportional = True
    ratio: float
    """The share of the entries that stays."""

    def __post_init__(self):
        assign(self, ratio=real_number("budget", "ratio", self.ratio, above=0.0, most=1.0))

    def of(self, tokens: int, entry_bytes: int) -> float:
        return self.ratio * tokens


@named_fields
@dataclass(frozen=True, repr=False)
class Entries(Budget):
    """A number of entries of each kv head, on average."""

    entries: int
    """The number of entries, at least 1."""

    def __post_init__(self):
        assign(self, entries=whole_number("budget", "entries", self.entries, most=UNLIMITED))

    def of(self, tokens: int, entry_bytes: int) -> float:
        return float(min(self.entries, tokens))


@named_fields
@dataclass(frozen=True, repr=False)
class Size(Budget):
    """A number of bytes of a sequence, for keys and values of all layers and heads together: a number, or "2GiB"."""

    size: int | str
    """The number of bytes."""

    def __post_init__(self):
        size = self.size
        if isinstance(size, str) and (count := byte_size(size)) is not None:
            size = count
        assign(self, size=whole_number("budget", "size", size, most=UNLIMITED))

    def of(self, tokens: int, entry_bytes: int) -> float:
        return min(int(self.size) / entry_bytes, tokens)


@named_fields
@dataclass(frozen=True, repr=False)
class Threshold(Budget):
    """Every entry with a score of at least `threshold`, whose meaning depends on the method's scores."""

    proportional = True
    threshold: float
    """The least score that stays."""

    def __post_init__(self):
        assign(self, threshold=real_number("budget", "threshold", self.threshold))

    @property
    def floor(self) -> float:
        return self.threshold

    def of(self, tokens: int, entry_bytes: int) -> float:
        return float(tokens)


BUDGETS: dict[str, type[Budget]] = {
    "ratio": Ratio,
    "entries": Entries,
    "size": Size,
    "threshold": Threshold,
}


def budget(**measures: Any) -> Budget | None:
    """Return the budget that is given by its name in `BUDGETS`; None if all are None. Raises UserError if several are
    given."""
    given = {name: x for name, x in measures.items() if x is not None}
    if not given:
        return None
    if len(given) > 1:
        raise UserError(f"a budget is one of {', '.join(BUDGETS)}, got {shown(given)}")
    ((name, number),) = given.items()
    return BUDGETS[name](number)  # pyright: ignore[reportCallIssue]


def rounded_down(number: float) -> int:
    """Return a number rounded down, without binary rounding errors: 0.29 · 100 is 28.999… in binary and means 29."""
    return math.floor(number * (1 + 1e-12))


def whole_entries(entries: float) -> int:
    """Return a number of entries rounded down (`rounded_down`), at least 1."""
    return max(1, rounded_down(entries))


def places(kept: float, layers: int, heads: int, over: str) -> Int[np.ndarray, "l k"]:
    """Return the number of places of each head cache, if head caches that share a budget (`Shares.over`) keep `kept`
    entries on average. Their total is rounded down and spread evenly."""
    sharing = {"head": 1, "layer": heads, "model": layers * heads}[over]
    total = rounded_down(sharing * kept)
    each = total // sharing + (np.arange(sharing) < total % sharing)
    return np.resize(each, (layers, heads))


@dataclass(frozen=True)
class Shares:
    """The way in which layers and heads share a budget."""

    over: str = "head"
    """The scope of the competition: "head" gives every kv head of a layer the same number of entries, "layer" lets a
    layer's heads share (AdaKV, arXiv:2407.11550), "model" all layers and heads (KVzip)."""
    pinned: float = 0.0
    """The share of its average that every head keeps of its own best entries, whatever others have (AdaKV's α)."""
    pyramid: float | None = None
    """The divisor of the last layer's budget: budgets fall linearly with depth, and the last layer gets 1/`pyramid` of
    the average (PyramidKV's β, arXiv:2406.02069). If that is fewer entries than must stay, all layers get the
    average. None: every layer gets the same."""

    def __post_init__(self):
        one_of("budget", "over", self.over, OVER)
        assign(self, pinned=real_number("budget", "pinned", self.pinned, 0.0, 1.0))
        if self.pyramid is not None:
            assign(self, pyramid=real_number("budget", "pyramid", self.pyramid, above=1.0))

    def check(self, layers: int) -> None:
        """Raise UserError if a model of so many layers has too few for a pyramid."""
        if self.pyramid is not None and layers < 2:
            raise UserError(f"a pyramid of budgets needs at least 2 layers, the model has {layers}")

    def counts(
        self, kept: Sequence[float], tokens: Sequence[int], layers: int, protected: Sequence[int]
    ) -> Int[np.ndarray, "l b"]:
        """Return the entries of a kv head, by layer and sequence, if a sequence keeps `kept` of `tokens` on average.

        `protected`: the least number of entries that a pyramid leaves each layer.
        """
        rows = [
            [whole_entries(n)] * layers
            if self.pyramid is None
            else pyramid(n, t, layers, least, self.pyramid)
            for n, t, least in zip(kept, tokens, protected, strict=True)
        ]
        return np.array(rows, np.int32).reshape(len(rows), layers).T

    def chunk_counts(
        self, kept: Sequence[int], tokens: Sequence[int], forced: Sequence[int], layers: int, window: int
    ) -> Int[np.ndarray, "l b"]:
        """Return the entries of a kv head, by layer and sequence, for a chunk of a prompt. Its newest `forced` entries
        stay in every layer."""
        rows = []
        for n, t, newest in zip(kept, tokens, forced, strict=True):
            newest = min(newest, t)
            if self.pyramid is None:
                rows.append([n] * layers)
            else:
                rows.append(chunk_pyramid(n - newest, t - newest, newest, layers, window, self.pyramid))
        return np.array(rows, np.int32).reshape(len(rows), layers).T

    def pins(self, counts: Int[np.ndarray, "l b ..."]) -> Int[np.ndarray, "l b ..."]:
        """Return the number of its own best entries that each head keeps: the share `pinned` of its count."""
        if self.pinned == 0:
            return np.zeros_like(counts)
        return np.minimum(np.vectorize(whole_entries)(self.pinned * counts), counts).astype(np.int32)


def pyramid(kept: float, tokens: int, layers: int, window: int, beta: float) -> list[int]:
    """Return PyramidKV's entries of each layer, the first layer's highest (kvpress 0.5.5's form of arXiv:2406.02069,
    Sec. 4.2).

    The last layer gets about the `beta`-th part of the average, and the others lie on a line. If that does not fit
    between the window and the tokens, every layer gets the average.
    """
    low = kept / beta
    high = 2 * kept - low
    if high >= tokens - window:
        high = tokens - window
        low = 2 * kept - high
    if not tokens >= high >= low >= window:
        return [max(1, round(kept))] * layers
    return [round(high - layer * (high - low) / (layers - 1)) for layer in range(layers)]


def chunk_pyramid(free: int, tokens: int, forced: int, layers: int, window: int, beta: float) -> list[int]:
    """Return PyramidKV's entries of each layer in a chunk: the `forced` ones, and on average `free` of the `tokens`
    others (PruLong's code for arXiv:2506.17121, Sec. 4.3, in whole numbers)."""
    low = math.floor(free / beta)
    high = 2 * free - low
    if high >= tokens:
        high = tokens
        low = 2 * free - high
    if tokens + window < 2 * free:
        return [forced + free] * layers
    step = (high - low) // (layers - 1)
    if step < layers:  # rounding it down would give the last layers too many entries
        return [forced + high - layer * (high - low) // (layers - 1) for layer in range(layers)]
    return [forced + high - layer * step for layer in range(layers)]
