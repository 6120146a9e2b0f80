"""What a cache held whenever tokens were run over it, for those who measure it."""

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Float, Int

from kvjax.cache import Cache
from kvjax.errors import UserError


@dataclass
class Calls:
    """A record that `kvjax.inference.sampling` writes to, call by call; every decoded token is a call."""

    held: list[Float[np.ndarray, " b"]] = field(default_factory=list)
    """Entries of a kv head, the mean over layers and heads, before each call."""
    tokens: list[Int[np.ndarray, " b"]] = field(default_factory=list)
    """How many tokens the call ran."""
    passing: list[bool] = field(default_factory=list)
    """Whether they were only read to look at others, and are no part of the sequence."""
    since: int = 0
    """Tokens before the first call."""

    def feed(self, cache: Cache, tokens: Int[np.ndarray, " b"]) -> None:
        """About to run so many tokens of each of the first sequences over `cache`."""
        length = np.asarray(cache.layers.length)
        self._add(length, np.asarray(cache.seen), cache.window, tokens)

    def decoded(
        self,
        length: Int[np.ndarray, "count l b k"],
        seen: Int[np.ndarray, "count b"],
        running: Bool[np.ndarray, "count b"],
        window: int,
        sequences: int,
    ) -> None:
        """A block was decoded: what the cache was before each of its tokens."""
        for before, tokens, fed in zip(length, seen, running, strict=True):
            self._add(before, tokens, window, fed[:sequences].astype(np.int32))

    def _add(self, length, seen, window, tokens):
        sequences = len(tokens)
        if not self.tokens:
            self.since = int(seen[:sequences].max())
        elif len(self.tokens[0]) != sequences or not seen[:sequences].any():
            raise UserError("a record of calls is of one batch of sequences: begin another one for others")
        ring = np.minimum(seen[:sequences], window - 1)
        self.held.append(length[:, :sequences].mean((0, 2)) + ring)
        self.tokens.append(tokens)
        self.passing.append(False)
