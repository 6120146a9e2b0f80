"""The schedule of an eviction: how much its compactions keep, and when they run."""

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
    """The newest tokens of a prompt that a compaction passes over. The next compaction looks at them, and the last one
    leaves them. Of the other tokens, those whose scores are above the last place's stay; while decoding, those whose
    scores are not below it (Fast KVzip, arXiv:2601.17668, Sec. 4; ties as in its code)."""

    tokens: int
    """The number of tokens."""
    short: int = 0
    """The length of prompts in tokens below which `share` applies."""
    share: float = 0.0
    """The share of a shorter prompt's tokens that is passed over, in place of `tokens`."""


class Needs(NamedTuple):
    """The requirements of an eviction, which a schedule must know."""

    last: int = 0
    """The number of newest entries of each kv head that always stay. They take places of the budget."""
    first: int = 0
    """The number of first entries of each kv head that always stay. They take places of the budget, too."""
    recent: float = 0.0
    """The share of the budget that always goes to the newest entries, if that is more than `last`."""
    observed: int = 0
    """The number of last tokens whose queries score."""
    ahead: Ahead | None = None
    """The newest tokens that a compaction of a prompt passes over, in place of `last` and `first`. Its budget is then
    shared out range by range. None: it passes over nothing."""
    prefix: int = 0
    """The number of a prompt's first tokens that always stay, in addition to the budget, which then counts only the
    others."""
    opening: tuple[int, ...] = ()
    """Token ids that prompts may begin with. The part of a prompt that it has in common with them stays as `prefix`
    does."""

    @property
    def longest_prefix(self) -> int:
        """The most of a prompt's first tokens that can stay in addition to the budget."""
        return max(self.prefix, len(self.opening))

    def prefix_of(self, row: Int[np.ndarray, " _"]) -> int:
        """Return the number of a prompt's first tokens that stay in addition to the budget. `row` holds its token
        ids."""
        common = (one == other for one, other in zip(row.tolist(), self.opening, strict=False))
        return max(self.prefix, [*common, False].index(False))


class Range(NamedTuple):
    """The tokens of a prompt that one compaction looks at."""

    tokens: int
    """The number of tokens."""
    ratio: float
    """The share of their entries that stays."""
    ahead: int
    """The number of tokens read so far that come after them."""


@named_fields
@dataclass(frozen=True, repr=False)
class Schedule:
    """A budget and a trigger: how much a compaction keeps, and when it runs. For example
    `Schedule(Ratio(0.25), Trigger("chunk", chunk=4096))`.

    Under a budget that grows with the tokens, a context no longer than the protected or observed tokens is kept whole.
    If the budget of a longer context is below its protected tokens, only the newest entries stay. An admission's window
    stays in any case. After chunks, a budget that grows with the tokens applies to each chunk: the chunk is scored by
    itself, and its survivors then stay. Other budgets apply to all entries.
    """

    budget: Budget
    """The amount that stays."""
    trigger: Trigger = None  # pyright: ignore[reportAssignmentType]
    """The trigger; by default the eviction's usual one (`Eviction.usual_trigger`), which `Policy` fills in."""
    needs: Needs = field(default=Needs(), repr=False)
    """The eviction's requirements, which `Policy` fills in."""
    shares: Shares = field(default=Shares(), repr=False)
    """The eviction's sharing of the budget, which `Policy` fills in, too."""

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
        """Raise UserError if the budget, the trigger and the eviction do not go together."""
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
        """True if a chunk's survivors are chosen among the chunk's own entries."""
        return self.trigger.in_chunks and (self.budget.proportional or self.needs.ahead is not None)

    @property
    def in_ranges(self) -> bool:
        """True if a prompt is compacted range by range, whatever the kind of its budget."""
        return self.needs.ahead is not None and not self.trigger.while_decoding

    @property
    def ties(self) -> str:
        """The rule for entries with the last place's score, one of `kvjax.topk.TIES`."""
        if self.needs.ahead is None:
            return "first"
        return "out" if self.in_ranges else "in"

    def range(self, tokens: int, before: int, read: int, entry_bytes: int, prefix: int = 0) -> Range:
        """Return the range of a prompt that a compaction looks at. Of the prompt's `tokens` tokens `read` were read,
        `before` of them before the previous compaction (Fast KVzip's code, `prefill`). The first `prefix` stay in
        addition to the budget."""
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
        """The number of a context's own last tokens that look back. Each token of guidance takes the place of one of
        them."""
        return max(0, self.needs.observed - len(self.trigger.guidance))

    @property
    def read_behind(self) -> int:
        """The most tokens that are read after the scored tokens to look at them, and removed again."""
        return max(self.needs.observed if self.trigger.patched else 0, len(self.trigger.guidance))

    def newest(self, kept: int | float, behind: int | None = None) -> int:
        """Return how many of the newest of `kept` entries always stay in a context. `behind` tokens were read after it
        only to look at it (None: as many as guidance has); they count among the newest that the method keeps."""
        behind = len(self.trigger.guidance) if behind is None else behind
        return max(0, max(self.needs.last, int(self.needs.recent * kept)) - behind)

    def stay(self, kept: int | float, ring: int = 0) -> int:
        """Return how many of `kept` entries always stay, the last `ring` of them in the local window."""
        return max(self.newest(kept), ring) + self.needs.first

    def allowance(self, tokens: Sequence[int], entry_bytes: int) -> list[float]:
        """Return the entries of a kv head that the budget gives contexts of so many tokens, not yet rounded."""
        needed = max(self.looking, self.newest(0) + self.needs.first) if self.budget.proportional else 0
        return [float(n) if n <= needed else self.budget.of(n, entry_bytes) for n in tokens]

    def of_prompts(self, tokens: Sequence[int], prefix: Sequence[int], entry_bytes: int) -> list[float]:
        """Return `allowance` for prompts of which the first `prefix` tokens always stay. They stay in addition to the
        budget, which counts only the other tokens (KVzip's code)."""
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

        If all layers and heads share the budget, the number of all of them together is whole, not each one's part.

        Args:
            kept: the result of `of_prompts`.
            prefix: the argument of `of_prompts`.
            ring: the number of last tokens in the local window.
        """
        if self.shares.over == "model" and self.shares.pyramid is None:
            return np.stack([places(share, layers, heads, "model") for share in kept], 1)
        # the tokens of guidance, after the context, are the pyramid's window
        behind = len(self.trigger.guidance)
        stay = [
            max(self.stay(share, ring) + first, behind) for share, first in zip(kept, prefix, strict=True)
        ]
        return self.shares.counts(kept, [count + behind for count in tokens], layers, stay)[..., None]

    def chunk_counts(
        self, tokens: Sequence[int], kept: Sequence[float], forced: Sequence[int], layers: int
    ) -> Int[np.ndarray, "l b"]:
        """Return the entries that stay, by layer and sequence, of chunks of contexts. Their newest `forced` stay
        anyway."""
        # a short last chunk may consist of newest tokens alone
        entries = [
            min(max(whole(share), newest), count)
            for share, newest, count in zip(kept, forced, tokens, strict=True)
        ]
        return self.shares.chunk_counts(entries, tokens, forced, layers, self.needs.observed)

    def check_bound(self, policy: str, ring: int, entry_bytes: int) -> None:
        """Raise UserError if a budget that does not grow with the tokens is below what always stays, `ring` entries of
        it in the local window. If the only compaction is at the prompt's end, just the local window counts: of the
        other protected entries, the newest that fit the budget are kept."""
        if not self.budget.proportional and not self.in_ranges:
            kept = whole(self.budget.of(2**62, entry_bytes))
            stay = ring if self.trigger.when == "prompt" else self.stay(kept, ring)
            if kept < stay:
                raise UserError(
                    f"{policy}: the budget of {kept} entries per kv head is below the {stay} that always stay"
                )

    def due(self, tokens: int, kept: float, ring: int) -> bool:
        """Return True if a sequence of so many tokens is over its budget of `kept` entries, and if it and its budget
        are large enough for the method. If a prompt is too short, the answer may still make up for it."""
        over = math.isfinite(self.budget.floor) or tokens > kept
        return over and tokens > self.needs.observed and whole(kept) >= self.stay(kept, ring)

    def most(self, tokens: int, entry_bytes: int) -> float:
        """Return the most entries of a kv head that are held at one time while `tokens` tokens are read."""
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
