"""Counts of pages of the engine's pool: those that sequences hold, may need at most, and are expected to need."""

import numpy as np
from jaxtyping import Float, Int

from kvjax.cache import MARGIN, Layout, longest_lengths, shard_pages
from kvjax.policies.policy import Policy

Lengths = Int[np.ndarray, "l b k"]
MEASURED = 0.2
"""The weight of the newest sequence in the moving average of what sequences retain."""


class PageCounts:
    """Counts pages of a pool, on the shard that has the most of them in use. `counted`: `Cache.counted`."""

    def __init__(self, host: Policy, layout: Layout):
        self._host, self._layout = host, layout
        self._share = MARGIN
        self._entry_bytes = layout.layers * layout.kv_heads * layout.entry_bytes

    def held(self, length: Lengths, counted: Int[np.ndarray, " b"]) -> int:
        """Return the pages that sequences with these retained entries and tokens hold."""
        return int(shard_pages(length, counted, self._layout.window, self._layout.page_size).max())

    def growth(self, length: Lengths, counted: Int[np.ndarray, " b"], tokens: Int[np.ndarray, " b"]) -> int:
        """Return the most further pages that `tokens` more tokens of each sequence may take, whatever the policy
        retains."""
        longer = longest_lengths(length, counted, tokens, self._layout.window, self._host.max_entries)
        sizes = self._layout.window, self._layout.page_size
        after, held = shard_pages(longer, counted + tokens, *sizes), shard_pages(length, counted, *sizes)
        return int((after - held).max())

    def copied(self, length: Lengths, counted: Int[np.ndarray, " b"]) -> int:
        """Return the most pages that a fork of a sequence does not share with it (`kvjax.engine.rows.forked`)."""
        if not self._host.rewrites_entries:  # full pages are only read
            length = length % self._layout.page_size
        return self.held(length, counted)

    def while_read(self, prompt: int) -> int:
        """Return the most pages that a prompt of `prompt` tokens is expected to take while it is read."""
        return self._expected(self._host.expected_entries(prompt, self._entry_bytes), prompt)

    def at_end(self, tokens: int, prompt: int) -> int:
        """Return the pages that a sequence of `tokens` tokens, of which `prompt` are its prompt, is expected to take at
        its end."""
        schedule = self._host.schedule
        compacted = prompt if schedule is not None and not self._host.compacts_answers else tokens
        entries = self._host.expected_entries(compacted, self._entry_bytes)
        if schedule is not None:
            entries = np.minimum(entries, schedule.allowance([compacted], self._entry_bytes)[0])
        filled = min(tokens - compacted, max(0, self._host.window - 1 - compacted))
        later = tokens - compacted - filled
        return self._expected(
            entries + filled + np.minimum(self._host.admission.admitted(later), later), tokens
        )

    def measure(self, length: Lengths, tokens: int) -> None:
        """Update the expected share of retained entries with those of a sequence of `tokens` tokens."""
        if self._host.schedule is None and tokens >= self._layout.window and length.size:
            ring = self._layout.window - 1
            expected = float(np.mean(self._host.expected_entries(tokens, self._entry_bytes))) - ring
            if expected > 0:
                share = float(length.mean()) / expected
                self._share += MEASURED * (max(share * MARGIN, 0.1) - self._share)

    def reset(self) -> None:
        """Forget what `measure` learned."""
        self._share = MARGIN

    def _expected(self, entries: Float[np.ndarray, "#l #k"], tokens: int) -> int:
        """Return the pages of a sequence of `tokens` tokens of which heads are expected to keep `entries` entries."""
        layout = self._layout
        ring = min(tokens, layout.window - 1)
        retained = (np.asarray(entries) - ring) * (self._share if self._host.schedule is None else 1)
        retained = np.ceil(np.clip(retained, 0, tokens - ring)).astype(np.int64)
        # a mean does not bound a single head: each may have one page more
        retained = np.where(
            (retained > 0) & (retained < tokens - ring), retained + layout.page_size, retained
        )
        retained = np.broadcast_to(retained, (layout.layers, layout.kv_heads))[:, None]
        return self.held(retained, np.array([tokens]))
