"""The entries that heads hold at each call in the paper's examples, against which measured footprints are tested."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from kvjax.evaluate.footprint import Occupancy


def call_sizes(prompt: int, output: int, chunk: int) -> Int[np.ndarray, " calls"]:
    """Return the tokens of each call: a prompt in chunks, then `output` tokens one by one."""
    whole, rest = divmod(prompt, chunk)
    return np.array([chunk] * whole + [rest] * (rest > 0) + [1] * output)


def streaming_head(prompt: int, output: int, chunk: int, *, sink: int, window: int) -> Occupancy:
    """Return a head that holds its first `sink` tokens and the last `window` before each call."""
    tokens = call_sizes(prompt, output, chunk)
    before = np.cumsum(tokens) - tokens
    local = np.minimum(before, window)
    return Occupancy((local + np.minimum(before - local, sink)).astype(float), tokens)


def evicting_head(
    prompt: int, output: int, chunk: int, *, share: float = 1.0, observed: int = 64
) -> Occupancy:
    """Return a head that keeps a `share` of each prefill chunk and `observed` more entries, as the paper counts."""
    tokens = call_sizes(prompt, output, chunk)
    prefill = len(tokens) - output
    # the paper's code rounds half to even, too
    stays = np.minimum(np.round(share * tokens).astype(int) + observed, tokens)
    stays[prefill:] = 1
    return Occupancy((np.cumsum(stays) - stays).astype(float), tokens)


def mean_head(parts: Sequence[tuple[float, Occupancy]]) -> Occupancy:
    """Return the mean head where each share of the heads is of one kind. The shares add up to 1."""
    first = parts[0][1]
    return Occupancy(
        np.sum([share * part.held for share, part in parts], axis=0), first.tokens, first.temporary
    )


def final(head: Occupancy) -> float:
    """Return the entries at the last call, before any compaction after it, relative to full attention."""
    return float((head.held + head.tokens)[-1] / head.length)
