"""When a cache is compacted, and how much stays: what the host knows of an eviction."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from kvjax.errors import UserError
from kvjax.policies.budget import Budget, Shares, whole

WHEN = "prompt", "chunk", "patched"


@dataclass(frozen=True)
class Plan:
    """budget: what stays, shared as `shares` says. last, first: of each kv head the newest and the very first entries
    that always stay and are counted in the budget. observed: the last tokens that the method looks back at.

    when: "prompt", once the prompt was read; "chunk", after every `chunk` tokens of it and at its end, so that the
    cache never holds all of it; "patched" (PruLong, arXiv:2506.17121, Sec. 4.3), the same, but what looks at a chunk
    are the prompt's own last tokens, read once more behind each chunk but the last and dropped again. A `ratio` is that
    of each chunk, which is scored by itself and whose survivors then stay; other budgets are met by all entries.
    """

    budget: Budget
    shares: Shares
    when: str = "prompt"
    chunk: int = 0
    last: int = 0
    first: int = 0
    observed: int = 0

    def __post_init__(self):
        if self.when not in WHEN:
            raise UserError(f"when is one of {', '.join(WHEN)}, got {self.when!r}")
        if self.when == "prompt" and self.chunk:
            raise UserError(f"chunk={self.chunk} needs when='chunk' or when='patched'")
        if self.when != "prompt" and self.chunk <= self.observed:
            raise UserError(
                f"when={self.when!r} needs a chunk of more than {self.observed} tokens, got {self.chunk}"
            )
        if self.when == "patched" and not self.observed:
            raise UserError("when='patched' is for methods that look back at the last tokens")
        if self.when == "chunk" and self.budget.size is None:
            kept, stay = whole(self.budget.of(self.chunk, 1)), self.last + self.first
            if kept < stay:
                raise UserError(
                    f"the budget of {kept} of a chunk's {self.chunk} entries per kv head is below the {stay} that "
                    "always stay"
                )

    @property
    def by_chunk(self) -> bool:
        """Whether a chunk's survivors are chosen among themselves."""
        return self.when != "prompt" and self.budget.ratio is not None

    def counts(
        self,
        policy: str,
        tokens: Sequence[int],
        forced: Sequence[int],
        ring: int,
        layers: int,
        entry_bytes: int,
    ) -> Int[np.ndarray, "l b"]:
        """Entries of a kv head that stay, by layer and sequence, of contexts (or chunks of them) of so many tokens, of
        which the newest `forced` stay anyway, and the last `ring` are in the ring. `entry_bytes`: one token's key and
        value in all layers and heads.

        Raises:
            UserError: a context that is not longer than what is observed, a budget below what always stays.
        """
        kept = [self.budget.of(count, entry_bytes) for count in tokens]
        if self.when == "prompt":
            for count, share in zip(tokens, kept, strict=True):
                self._check(policy, count, whole(share), max(self.last, ring) + self.first)
            return self.shares.counts(kept, tokens, layers, self.last)
        # a short last chunk may be all newest tokens
        entries = [
            min(max(whole(share), newest), count)
            for share, newest, count in zip(kept, forced, tokens, strict=True)
        ]
        return self.shares.chunk_counts(entries, tokens, forced, layers, self.observed)

    def _check(self, policy: str, tokens: int, kept: int, stay: int) -> None:
        if tokens <= self.observed:
            raise UserError(
                f"{policy} looks at the last {self.observed} tokens: a context of {tokens} is too short for it"
            )
        if kept < min(stay, tokens):
            raise UserError(
                f"{policy}: the budget of {kept} of {tokens} entries per kv head is below the {stay} that always stay"
            )

    def most(self, tokens: int) -> float:
        """Entries of a kv head that are held at most at one time while `tokens` tokens are read."""
        if self.when == "prompt" or self.budget.size is not None:
            return float(tokens)
        kept = self.budget.of(tokens, 1)
        return min(float(tokens), kept + self.chunk + self.observed)
