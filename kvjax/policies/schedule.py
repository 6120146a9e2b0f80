"""The schedule of an eviction: how much its compactions keep, and when they run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from kvjax.errors import UserError, named_fields, shown
from kvjax.mesh import HEADS, axis_size
from kvjax.policies.budget import UNLIMITED, Budget, Shares, Size, places, rounded_down, whole_entries
from kvjax.policies.trigger import Trigger
from kvjax.struct import short


class Undecided(NamedTuple):
    """The newest tokens of a prompt, which a compaction passes over. The next compaction looks at them, and the last
    compaction keeps them. The other tokens stay if their scores are above that of the last place or, while decoding, at
    least that score (Fast KVzip, arXiv:2601.17668, Sec. 4; ties as in its code)."""

    tokens: int
    """The number of tokens."""
    short: int = 0
    """The length of prompts in tokens below which `share` applies."""
    share: float = 0.0
    """The share of a shorter prompt's tokens that is passed over, in place of `tokens`."""


class Needs(NamedTuple):
    """The requirements of an eviction, which a schedule must know."""

    last: int = 0
    """The number of newest entries of each kv head that always stay. They count in the budget."""
    first: int = 0
    """The number of first entries of each kv head that always stay. They count in the budget, too."""
    recent: float = 0.0
    """The share of the budget that always goes to the newest entries, if that is more than `last`."""
    observed: int = 0
    """The number of last tokens whose queries score the entries."""
    undecided: Undecided | None = None
    """The newest tokens that a compaction of a prompt passes over, in place of `last` and `first`. The prompt's budget
    is then divided among ranges of it. None: it passes over nothing."""
    prefix: int = 0
    """The number of a prompt's first tokens that always stay, in addition to the budget, which then counts only the
    others."""
    opening: tuple[int, ...] = ()
    """Token ids that prompts may begin with. The tokens that the beginning of a prompt has in common with them stay as
    `prefix` does."""

    @property
    def longest_prefix(self) -> int:
        """The largest number of a prompt's first tokens that can stay in addition to the budget."""
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
    undecided: int
    """The number of undecided tokens that follow these."""


@named_fields
@dataclass(frozen=True, repr=False)
class Schedule:
    """A budget and a trigger: how much a compaction keeps, and when it runs. For example
    `Schedule(Ratio(0.25), Trigger("chunk", chunk=4096))`.

    Under a budget that grows with the tokens, a context no longer than the protected or observed tokens is kept whole.
    If a longer context has more protected tokens than its budget, only the newest entries stay. An admission's window
    always stays. With chunks, a budget that grows with the tokens applies to each chunk: a chunk is scored by itself,
    and the entries that survive it stay for good. Other budgets apply to all entries.
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
        """Raise UserError if the budget, the trigger and the eviction cannot be combined."""
        when, chunk = self.trigger.when, self.trigger.chunk
        if self.trigger.in_chunks and chunk <= self.observed_in_context:
            raise UserError(
                f"when={when!r} needs a chunk of more than {self.observed_in_context} tokens, got {chunk}"
            )
        if (self.trigger.patched or self.trigger.guidance) and not self.needs.observed:
            given = self.trigger.observers
            raise UserError(f"observers={given!r} is for methods that look back at the last tokens")
        if self.trigger.in_chunks and not self.in_ranges and not isinstance(self.budget, Size):
            kept = whole_entries(self.budget.of(chunk, 1))
            protected = self.protected(kept)
            if kept < protected:
                raise UserError(
                    f"the budget of {kept} of a chunk's {chunk} entries per kv head is below the {protected} that "
                    "always stay"
                )
        if self.in_ranges and self.shares.pyramid is not None:
            raise UserError(
                "a pyramid divides budgets of whole prompts, and this method divides them among ranges of a prompt"
            )
        if when in ("overflow", "position") and self.budget.proportional:
            raise UserError(f"when={when!r} needs a budget in entries or size, which an answer can outgrow")
        if when == "overflow" and self.shares != Shares():
            raise UserError(
                "when='overflow' drops a share of every head's own entries, so over, pinned and pyramid have no effect"
            )

    @property
    def by_chunk(self) -> bool:
        """True if a chunk's survivors are chosen among the chunk's own entries."""
        return self.trigger.in_chunks and (self.budget.proportional or self.needs.undecided is not None)

    @property
    def in_ranges(self) -> bool:
        """True if a prompt is compacted range by range, whatever the kind of its budget."""
        return self.needs.undecided is not None and not self.trigger.while_decoding

    @property
    def ties(self) -> str:
        """The rule for entries with the last place's score, one of `kvjax.topk.TIES`."""
        if self.needs.undecided is None:
            return "first"
        return "out" if self.in_ranges else "in"

    def range(self, tokens: int, before: int, read: int, entry_bytes: int, prefix: int = 0) -> Range:
        """Return the range of a prompt that a compaction looks at. `read` of the prompt's `tokens` tokens have been
        read, `before` of them before the previous compaction (Fast KVzip's code, `prefill`). The first `prefix` tokens
        stay in addition to the budget."""
        assert self.needs.undecided is not None
        of_prompt = max(tokens - prefix, 0)
        kept = min(self.budget.of(of_prompt, entry_bytes), of_prompt)
        undecided = self.needs.undecided.tokens
        if of_prompt < self.needs.undecided.short:
            undecided = int(self.needs.undecided.share * of_prompt)
        if kept < undecided:
            undecided, ratio = rounded_down(kept), 0.0
        else:
            ratio = (kept - undecided) / (of_prompt - undecided) if of_prompt > undecided else 1.0
        start = max(prefix, before - undecided)
        return Range(max(read - undecided - start, 0), ratio, min(undecided, max(read - start, 0)))

    @property
    def observed_in_context(self) -> int:
        """The number of a context's own last tokens whose queries score. Each token of guidance replaces one of
        them."""
        return max(0, self.needs.observed - len(self.trigger.guidance))

    @property
    def temporary_tokens(self) -> int:
        """The largest number of tokens that are read after the scored tokens to look at them, and removed again."""
        return max(self.needs.observed if self.trigger.patched else 0, len(self.trigger.guidance))

    def newest(self, kept: int | float, temporary: int | None = None) -> int:
        """Return how many of the newest of `kept` entries always stay in a context. `temporary` tokens were read after
        it only to look at it (None: the tokens of guidance). They count among the newest that the method keeps."""
        temporary = len(self.trigger.guidance) if temporary is None else temporary
        return max(0, max(self.needs.last, rounded_down(self.needs.recent * kept)) - temporary)

    def protected(self, kept: int | float, local: int = 0) -> int:
        """Return how many of `kept` entries always stay. The last `local` of them are in the local window."""
        return max(self.newest(kept), local) + self.needs.first

    def allowance(self, tokens: Sequence[int], entry_bytes: int) -> list[float]:
        """Return the entries of a kv head that the budget gives contexts of so many tokens, not yet rounded."""
        least = max(self.observed_in_context, self.newest(0) + self.needs.first)
        least = least if self.budget.proportional else 0
        return [float(n) if n <= least else self.budget.of(n, entry_bytes) for n in tokens]

    def prompt_allowance(self, tokens: Sequence[int], prefix: Sequence[int], entry_bytes: int) -> list[float]:
        """Return `allowance` for prompts whose first `prefix` tokens always stay. They stay in addition to the budget,
        which counts only the other tokens (KVzip's code)."""
        prefix = [min(first, count) for count, first in zip(tokens, prefix, strict=True)]
        others = [count - first for count, first in zip(tokens, prefix, strict=True)]
        kept = self.allowance(others, entry_bytes)
        return [first + share for first, share in zip(prefix, kept, strict=True)]

    def counts(
        self,
        tokens: Sequence[int],
        kept: Sequence[float],
        prefix: Sequence[int],
        local: int,
        layers: int,
        heads: int,
    ) -> Int[np.ndarray, "l b k_or_1"]:
        """Return the number of entries that stay in contexts of so many tokens, by layer, sequence and kv head.

        If all layers and heads share the budget, only the sum of their parts is a whole number.

        Args:
            kept: the result of `prompt_allowance`.
            prefix: the argument of `prompt_allowance`.
            local: the number of last tokens in the local window.
        """
        if self.shares.over == "model" and self.shares.pyramid is None:
            return np.stack([places(share, layers, heads, "model") for share in kept], 1)
        # the tokens of guidance, after the context, are the pyramid's window
        guidance = len(self.trigger.guidance)
        protected = [
            max(self.protected(share, local) + first, guidance)
            for share, first in zip(kept, prefix, strict=True)
        ]
        return self.shares.counts(kept, [count + guidance for count in tokens], layers, protected)[..., None]

    def chunk_counts(
        self, tokens: Sequence[int], kept: Sequence[float], forced: Sequence[int], layers: int
    ) -> Int[np.ndarray, "l b"]:
        """Return the number of entries that stay in chunks of contexts, by layer and sequence. Their newest `forced`
        entries always stay."""
        # a short last chunk may consist of newest tokens alone
        entries = [
            min(max(whole_entries(share), newest), count)
            for share, newest, count in zip(kept, forced, tokens, strict=True)
        ]
        return self.shares.chunk_counts(entries, tokens, forced, layers, self.needs.observed)

    def check_bound(self, policy: str, local: int, entry_bytes: int) -> None:
        """Raise UserError if a budget that does not grow with the tokens is below the number of entries that always
        stay, `local` of them in the local window. If the only compaction is at the prompt's end, just the local window
        counts, because then only the newest protected entries that fit the budget are kept."""
        if not self.budget.proportional and not self.in_ranges:
            kept = whole_entries(self.budget.of(UNLIMITED, entry_bytes))
            protected = local if self.trigger.when == "prompt" else self.protected(kept, local)
            if kept < protected:
                raise UserError(
                    f"{policy}: the budget of {kept} entries per kv head is below the {protected} that always stay"
                )

    def due(self, tokens: int, kept: float, local: int) -> bool:
        """Return True if a sequence of so many tokens is over its budget of `kept` entries, and if the sequence and its
        budget are large enough for the method. A prompt that is too short may be compacted later, with its answer."""
        over = math.isfinite(self.budget.floor) or tokens > kept
        return over and tokens > self.needs.observed and whole_entries(kept) >= self.protected(kept, local)

    def peak_entries(self, tokens: int, entry_bytes: int) -> float:
        """Return the largest number of entries that a kv head holds while `tokens` tokens are read."""
        chunk = self.trigger.chunk
        if not self.trigger.in_chunks:
            return float(tokens)
        if self.needs.undecided is not None:
            kept = self.budget.of(tokens, entry_bytes) + self.needs.longest_prefix
        elif self.by_chunk:
            # a chunk keeps a whole number of entries in each layer
            kept = math.ceil(tokens / chunk) * (whole_entries(self.budget.of(chunk, entry_bytes)) + 1)
        else:
            kept = self.budget.of(tokens, entry_bytes)
        if self.shares.over != "head":
            # the heads of one shard may win the whole budget
            kept *= axis_size(*HEADS)
        return float(min(tokens, kept + chunk + max(self.needs.observed, self.temporary_tokens)))
