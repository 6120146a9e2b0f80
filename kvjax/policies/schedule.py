"""The schedule of an eviction: how much its compactions keep, and when there is one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from kvjax.errors import UserError, named_fields, shown
from kvjax.mesh import HEADS, axis_size
from kvjax.policies.budget import Budget, Shares, Size, places, whole
from kvjax.policies.trigger import Trigger
from kvjax.struct import short


class Ahead(NamedTuple):
    """The newest tokens of a prompt that a compaction passes over: the next one looks at them, and the last one leaves
    them. What stays of the others is what is above a threshold, the last place's score, and while decoding what is
    not below it (Fast KVzip, arXiv:2601.17668, Sec. 4; ties as in its code)."""

    tokens: int
    """How many."""
    short: int = 0
    """Of prompts below so many tokens …"""
    share: float = 0.0
    """… it is this share of theirs."""


class Needs(NamedTuple):
    """What a schedule must know of an eviction."""

    last: int = 0
    """The newest entries of each kv head that always stay. They take places of the budget."""
    first: int = 0
    """The very first entries of each kv head that always stay. They take places of the budget, too."""
    recent: float = 0.0
    """The share of the budget that always goes to the newest, if that is more than `last`."""
    observed: int = 0
    """How many of the last tokens are looked back at."""
    ahead: Ahead | None = None
    """What a compaction of a prompt passes over, in place of `last` and `first`, so that its budget is shared out range
    by range; None: nothing."""
    prefix: int = 0
    """A prompt's first tokens that always stay, beside the budget, which is that of the other tokens."""
    opening: tuple[int, ...] = ()
    """Token ids that prompts may begin with. What a prompt has in common with them stays as `prefix` does."""

    @property
    def longest_prefix(self) -> int:
        """The most of a prompt's first tokens that stay beside the budget."""
        return max(self.prefix, len(self.opening))

    def prefix_of(self, row: Int[np.ndarray, " _"]) -> int:
        """How many of a prompt's first tokens stay beside the budget, of its token ids."""
        common = (one == other for one, other in zip(row.tolist(), self.opening, strict=False))
        return max(self.prefix, [*common, False].index(False))


class Range(NamedTuple):
    """The tokens of a prompt that one compaction looks at."""

    tokens: int
    """How many."""
    ratio: float
    """The share of their entries that stays."""
    ahead: int
    """How many of the tokens read so far come after them."""


@named_fields
@dataclass(frozen=True, repr=False)
class Schedule:
    """How much a compaction keeps, and when there is one: `Schedule(Ratio(0.25), Trigger("chunk", chunk=4096))`.

    A context no longer than what always stays, or looks, is kept whole by a budget that grows with the tokens; of a
    longer one whose budget is less than that the newest entries stay. An admission's window stays in any case. After
    chunks, a budget that grows with the tokens is that of each chunk, which is scored by itself and whose
    survivors then stay; other budgets are met by all entries.
    """

    budget: Budget
    """What stays."""
    trigger: Trigger = None  # pyright: ignore[reportAssignmentType]
    """When; by default as the eviction usually is (`Eviction.usual_trigger`), which `Policy` fills in."""
    needs: Needs = field(default=Needs(), repr=False)
    """The eviction's, which `Policy` fills in."""
    shares: Shares = field(default=Shares(), repr=False)
    """The eviction's, too."""

    def __post_init__(self):
        if not isinstance(self.budget, Budget):
            raise UserError(
                f"schedule: budget must be an object such as Ratio(0.25), got {shown(self.budget)}"
            )
        if not isinstance(self.trigger, Trigger | None):
            raise UserError(f"schedule: trigger must be a Trigger, got {shown(self.trigger)}")

    def __repr__(self) -> str:
        return short(self)

    def check(self) -> None:
        """Refuse a budget, a trigger and an eviction that do not go together."""
        when, chunk = self.trigger.when, self.trigger.chunk
        if self.trigger.in_chunks and chunk <= self.looking:
            raise UserError(f"when={when!r} needs a chunk of more than {self.looking} tokens, got {chunk}")
        if (self.trigger.patched or self.trigger.guidance) and not self.needs.observed:
            given = self.trigger.observers
            raise UserError(f"observers={given!r} is for methods that look back at the last tokens")
        if self.trigger.in_chunks and not self.in_ranges and not isinstance(self.budget, Size):
            kept = whole(self.budget.of(chunk, 1))
            stay = self.stay(kept)
            if kept < stay:
                raise UserError(
                    f"the budget of {kept} of a chunk's {chunk} entries per kv head is below the {stay} that always "
                    "stay"
                )
        if self.in_ranges and self.shares.pyramid is not None:
            raise UserError(
                "a pyramid of budgets is of whole prompts, and this method's are of ranges of them"
            )
        if when in ("overflow", "position") and self.budget.proportional:
            raise UserError(f"when={when!r} needs a budget in entries or size, which an answer can outgrow")
        if when == "overflow" and self.shares != Shares():
            raise UserError(
                "when='overflow' takes a share of every head's own entries: over, pinned, pyramid say nothing"
            )

    @property
    def by_chunk(self) -> bool:
        """Whether a chunk's survivors are chosen among themselves."""
        return self.trigger.in_chunks and (self.budget.proportional or self.needs.ahead is not None)

    @property
    def in_ranges(self) -> bool:
        """Whether a prompt is compacted range by range, whatever the kind of its budget."""
        return self.needs.ahead is not None and not self.trigger.while_decoding

    @property
    def ties(self) -> str:
        """Which entries with the last place's score stay, one of `kvjax.topk.TIES`."""
        if self.needs.ahead is None:
            return "first"
        return "out" if self.in_ranges else "in"

    def range(self, tokens: int, before: int, read: int, entry_bytes: int, prefix: int = 0) -> Range:
        """What a compaction looks at of a prompt of `tokens` tokens of which `read` were read, `before` of them before
        the last compaction (Fast KVzip's code, `prefill`); the first `prefix` of them stay beside the budget."""
        assert self.needs.ahead is not None
        of_prompt = max(tokens - prefix, 0)
        kept = min(self.budget.of(of_prompt, entry_bytes), of_prompt)
        ahead = self.needs.ahead.tokens
        if of_prompt < self.needs.ahead.short:
            ahead = int(self.needs.ahead.share * of_prompt)
        if kept < ahead:
            ahead, ratio = math.floor(kept * (1 + 1e-12)), 0.0
        else:
            ratio = (kept - ahead) / (of_prompt - ahead) if of_prompt > ahead else 1.0
        start = max(prefix, before - ahead)
        return Range(max(read - ahead - start, 0), ratio, min(ahead, max(read - start, 0)))

    @property
    def looking(self) -> int:
        """How many of a context's own last tokens look back: none where guidance does."""
        return max(0, self.needs.observed - len(self.trigger.guidance))

    @property
    def read_behind(self) -> int:
        """The most tokens that are read behind what is scored to look at it, and dropped again."""
        return max(self.needs.observed if self.trigger.patched else 0, len(self.trigger.guidance))

    def newest(self, kept: int | float, behind: int | None = None) -> int:
        """How many of the newest of `kept` entries always stay of a context behind which so many tokens (None: as many
        as guidance has) were only read to look at it. They are among the newest that the method keeps."""
        behind = len(self.trigger.guidance) if behind is None else behind
        return max(0, max(self.needs.last, int(self.needs.recent * kept)) - behind)

    def stay(self, kept: int | float, ring: int = 0) -> int:
        """Return how many of `kept` entries always stay, the last `ring` of them in the local window."""
        return max(self.newest(kept), ring) + self.needs.first

    def allowance(self, tokens: Sequence[int], entry_bytes: int) -> list[float]:
        """Entries of a kv head that the budget gives contexts of so many tokens, not yet rounded."""
        needed = max(self.looking, self.newest(0) + self.needs.first) if self.budget.proportional else 0
        return [float(n) if n <= needed else self.budget.of(n, entry_bytes) for n in tokens]

    def of_prompts(self, tokens: Sequence[int], prefix: Sequence[int], entry_bytes: int) -> list[float]:
        """Return what `allowance` does for prompts of which the first `prefix` tokens always stay: beside the budget,
        which is that of the other tokens (KVzip's code)."""
        beside = [min(first, count) for count, first in zip(tokens, prefix, strict=True)]
        others = [count - first for count, first in zip(tokens, beside, strict=True)]
        kept = self.allowance(others, entry_bytes)
        return [first + share for first, share in zip(beside, kept, strict=True)]

    def counts(
        self,
        tokens: Sequence[int],
        kept: Sequence[float],
        prefix: Sequence[int],
        ring: int,
        layers: int,
        heads: int,
    ) -> Int[np.ndarray, "l b k_or_1"]:
        """Return the entries that stay, by layer, sequence and kv head, of contexts of so many tokens.

        Where all layers and heads share the budget, their total is a whole number, and not the part of each.

        Args:
            kept, prefix: of `of_prompts`.
            ring: how many of the last tokens are in the local window.
        """
        if self.shares.over == "model" and self.shares.pyramid is None:
            return np.stack([places(share, layers, heads, "model") for share in kept], 1)
        # guidance is a pyramid's window, which stands behind the tokens
        behind = len(self.trigger.guidance)
        stay = [
            max(self.stay(share, ring) + first, behind) for share, first in zip(kept, prefix, strict=True)
        ]
        return self.shares.counts(kept, [count + behind for count in tokens], layers, stay)[..., None]

    def chunk_counts(
        self, tokens: Sequence[int], kept: Sequence[float], forced: Sequence[int], layers: int
    ) -> Int[np.ndarray, "l b"]:
        """The same of chunks of contexts, of which the newest `forced` stay anyway."""
        # a short last chunk may be all newest tokens
        entries = [
            min(max(whole(share), newest), count)
            for share, newest, count in zip(kept, forced, tokens, strict=True)
        ]
        return self.shares.chunk_counts(entries, tokens, forced, layers, self.needs.observed)

    def check_bound(self, policy: str, ring: int, entry_bytes: int) -> None:
        """UserError if a budget that does not grow with the tokens is below what always stays, `ring` entries of it in
        the ring. Once at a prompt's end only the ring does: of less than the others the newest are kept."""
        if not self.budget.proportional and not self.in_ranges:
            kept = whole(self.budget.of(2**62, entry_bytes))
            stay = ring if self.trigger.when == "prompt" else self.stay(kept, ring)
            if kept < stay:
                raise UserError(
                    f"{policy}: the budget of {kept} entries per kv head is below the {stay} that always stay"
                )

    def due(self, tokens: int, kept: float, ring: int) -> bool:
        """Whether a sequence of so many tokens has more than its budget of `kept` entries, and enough of both for the
        method: an answer may still make up for a prompt that is too short."""
        over = math.isfinite(self.budget.floor) or tokens > kept
        return over and tokens > self.needs.observed and whole(kept) >= self.stay(kept, ring)

    def most(self, tokens: int, entry_bytes: int) -> float:
        """Entries of a kv head that are held at most at one time while `tokens` tokens are read."""
        chunk = self.trigger.chunk
        if not self.trigger.in_chunks:
            return float(tokens)
        if self.needs.ahead is not None:
            kept = self.budget.of(tokens, entry_bytes) + self.needs.longest_prefix
        elif self.by_chunk:
            # a chunk keeps whole entries, in each layer
            kept = math.ceil(tokens / chunk) * (whole(self.budget.of(chunk, entry_bytes)) + 1)
        else:
            kept = self.budget.of(tokens, entry_bytes)
        if self.shares.over != "head":
            # heads that compete may leave all of a budget to those of one shard
            kept *= axis_size(*HEADS)
        return float(min(tokens, kept + chunk + max(self.needs.observed, self.read_behind)))
