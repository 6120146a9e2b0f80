"""Sequences at the ends of prompts, which later prompts continue."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Int

from kvjax.engine.pages import PageCounts
from kvjax.engine.pool import Pool
from kvjax.engine.request import Request, Spans
from kvjax.engine.rows import Row
from kvjax.mesh import on_host


class Fork(NamedTuple):
    """A sequence that does not run. It shares pages of retained entries with the sequence that it was copied from, and
    with those that continue it."""

    tokens: Int[np.ndarray, " t"]
    """The tokens that it has read."""
    row: Row
    logits: Array
    """Logits after the last token, [1 v]."""
    pages: int
    """The number of pages that it holds, shared ones included."""
    dropped: Spans = ()
    """The tokens that were dropped, as in `Request.dropped`."""


class Forks:
    """The forks that are kept. Named ones stay until they are dropped. The others stay until their pages are needed, at
    most the `max_unnamed` that were used last."""

    def __init__(self, pool: Pool, page_counts: PageCounts, max_unnamed: int):
        self._pool, self._page_counts, self._max_unnamed = pool, page_counts, max_unnamed
        # in the order of their last use
        self._unnamed: list[Fork] = []
        self.named: dict[str, Fork] = {}

    def __len__(self) -> int:
        return len(self._unnamed) + len(self.named)

    def keep(self, tokens: Int[np.ndarray, " t"], row: Row, logits: Array, dropped: Spans = ()) -> None:
        """Keep a fork of a sequence that has read `tokens` and dropped some, if the pool has pages for it."""
        if (copy := self.copy(row)) is not None:
            self._unnamed.append(self._made(tokens, copy, logits, dropped))
        if len(self._unnamed) > self._max_unnamed:
            self._release(self._unnamed[0])

    def name(self, request: Request, row: Row, logits: Array) -> None:
        """Keep the sequence of a context that was read, under the context's name."""
        assert request.context is not None
        self.named[request.context] = self._made(request.prompt, row, logits)
        request.finish_reason = "stop"

    def _made(self, tokens: Int[np.ndarray, " t"], row: Row, logits: Array, dropped: Spans = ()) -> Fork:
        pages = self._page_counts.held(on_host(row.layers.length), on_host(row.counted))
        return Fork(tokens, row, logits, pages, dropped)

    @property
    def named_pages(self) -> int:
        """Pages of the named forks."""
        return sum(fork.pages for fork in self.named.values())

    def longest(self, prompt: Int[np.ndarray, " t"], dropped: Spans = ()) -> Fork | None:
        """Return the longest unnamed fork that a prompt can continue: the prompt begins with the fork's tokens, and the
        fork dropped only tokens that the prompt drops. A fork that has read the whole prompt must have dropped the same
        spans."""
        matching = [
            fork
            for fork in self._unnamed
            if np.array_equal(fork.tokens, prompt[: fork.tokens.size])
            and _within(fork.dropped, dropped)
            and (fork.tokens.size < prompt.size or fork.dropped == dropped)
        ]
        best = max(
            matching,
            key=lambda x: (x.tokens.size, sum(end - start for start, end in x.dropped)),
            default=None,
        )
        if best is not None:
            self._unnamed = [*(x for x in self._unnamed if x is not best), best]
        return best

    def copy(self, row: Row) -> Row | None:
        """Return a fork of a sequence; None if the pool has no pages for it."""
        need = self._page_counts.copied(on_host(row.layers.length), on_host(row.counted))
        return self._pool.fork(row) if need <= self._pool.free else None

    def make_room(self, pages: int, keep: Fork | None = None) -> bool:
        """Drop unnamed forks other than `keep` until `pages` pages are free, if that can be enough. Returns True if
        they are free now."""
        others = [fork for fork in self._unnamed if fork is not keep]
        while pages > self._pool.free and pages <= self._pool.free + sum(fork.pages for fork in others):
            self._release(others.pop(0))
        return pages <= self._pool.free

    def _release(self, fork: Fork) -> None:
        self._unnamed = [x for x in self._unnamed if x is not fork]
        self._pool.release(fork.row)

    def release(self, name: str) -> None:
        """Free the pages of a named fork."""
        self._pool.release(self.named.pop(name).row)

    def release_unnamed(self) -> None:
        """Free the pages of all forks without a name."""
        while self._unnamed:
            self._release(self._unnamed[0])


def _within(spans: Spans, others: Spans) -> bool:
    """Return True if `others`, of which no two touch, cover all tokens of `spans`."""
    return all(any(first <= start and end <= last for first, last in others) for start, end in spans)
