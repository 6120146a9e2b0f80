"""How much a compaction keeps of each row, worked out on the host by the policy's schedule."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Array, Int

from kvjax.cache import Cache, Quota
from kvjax.mesh import BATCH, HEADS, put
from kvjax.policies.budget import places
from kvjax.policies.policy import Policy
from kvjax.policies.schedule import Range, Schedule


def quota(
    policy: Policy,
    cache: Cache,
    tokens: Sequence[int],
    *,
    due: Sequence[bool] | None = None,
    since: Int[Array, "l b k"] | None = None,
    dropped: Sequence[int] | None = None,
    prefix: Sequence[int] = (),
) -> Quota:
    """What stays, by the policy's schedule, of contexts (or of chunks of them) of so many tokens, a number a sequence.

    Args:
        due: which sequences are compacted; None: all.
        since: lengths of the rows before the chunk; None: everything is eligible.
        dropped: how many more entries behind these are of tokens that were only read to look at them; None: none.
        prefix: how many of the first always stay of each prompt; (): none.
    """
    schedule = policy.schedule
    assert schedule is not None
    layers, slots = len(cache.layers.length), cache.window - 1
    due = [True] * len(tokens) if due is None else list(due)
    dropped = [0] * len(tokens) if dropped is None else dropped
    prefix = prefix or [0] * len(tokens)
    allowed = schedule.of_prompts(tokens, prefix, cache.entry_bytes)
    newest = [schedule.newest(share, gone or None) for share, gone in zip(allowed, dropped, strict=True)]
    if schedule.trigger.in_chunks:
        counts = schedule.chunk_counts(tokens, allowed, newest, layers)[..., None]
    else:
        counts = schedule.counts(tokens, allowed, prefix, slots, layers, cache.layers.length.shape[2])
    counts = np.maximum(counts - np.minimum(slots, tokens)[:, None], 0)
    # a budget below what always stays: the newest
    least = counts.min((0, 2))
    last = np.minimum(_beyond(newest, slots), least)
    first = np.minimum(schedule.needs.first, least - last)
    return _on_devices(schedule, cache, due, counts, last, first, dropped, since)


def range_quota(
    policy: Policy,
    cache: Cache,
    rows: Sequence[Int[np.ndarray, " _"]],
    read: int | None = None,
    before: int = 0,
) -> Quota:
    """What stays of the ranges that a schedule with `Needs.ahead` looks at, of prompts of these token ids.

    The places of a range are a whole number of all that compete, int(ratio · entries), and not of each head.

    Args:
        read: how many were read of each, if it has so many; None: all.
        before: how many of them before the last compaction.
    """
    schedule, eviction = policy.schedule, policy.eviction
    assert schedule is not None
    assert eviction is not None
    layers, _, heads = cache.layers.length.shape

    def looked_at(row: Int[np.ndarray, " _"]) -> Range:
        end = row.size if read is None else min(row.size, read)
        prefix = eviction.prefix_of(row)
        return schedule.range(row.size, min(row.size, before), end, cache.entry_bytes, prefix)

    ranges = [looked_at(row) for row in rows]
    counts = np.stack([places(x.tokens * x.ratio, layers, heads, schedule.shares.over) for x in ranges], 1)
    newest = np.array([x.tokens + x.ahead for x in ranges], np.int32)
    none = np.zeros(len(ranges), np.int32)
    batch = cache.layers.length.shape[1]
    undecided = put(np.pad(newest, (0, batch - len(newest))), BATCH)
    since = cache.layers.length - undecided[:, None]
    due = [x.tokens > 0 for x in ranges]
    quota = _on_devices(schedule, cache, due, counts, none, none, none, since)
    ahead = np.array([x.ahead for x in ranges], np.int32)
    return dataclasses.replace(quota, ahead=put(np.pad(ahead, (0, batch - len(ahead))), BATCH))


def overflow_quota(policy: Policy, cache: Cache, over: Int[np.ndarray, " b"]) -> Quota:
    """What stays where every head loses a share of its own entries, once or as often as it takes until a sequence has
    lost as many as it is `over` its budget (`when="overflow"`). Nothing for one that is not."""
    schedule = policy.schedule
    assert schedule is not None
    length = np.asarray(cache.layers.length)[:, : len(over)]
    seen, slots = np.asarray(cache.seen)[: len(over)], cache.window - 1
    last = _beyond(
        [schedule.newest(share) for share in schedule.allowance(seen.tolist(), cache.entry_bytes)], slots
    )
    counts = length.copy()
    while (low := (length - counts).sum((0, 2)) < over).any():
        free = np.maximum(counts - (last + schedule.needs.first)[:, None], 0)
        gone = np.floor(schedule.trigger.drop * (1 + 1e-12) * counts).astype(np.int32)
        gone = np.minimum(np.maximum(gone, 1), free) * low[:, None]
        if not gone.any():
            break
        counts -= gone
    first = np.full(len(over), schedule.needs.first)
    return _on_devices(schedule, cache, over > 0, counts, last, first, np.zeros_like(first), None)


def _beyond(newest, slots) -> Int[np.ndarray, " b"]:
    """How many of each sequence's newest tokens are beyond the ring."""
    return np.maximum(0, np.array(newest, np.int32) - slots)


def _on_devices(schedule: Schedule, cache: Cache, due, counts, last, first, dropped, since) -> Quota:
    layers, batch, heads = cache.layers.length.shape
    empty = (0, batch - len(due))

    def by_sequence(x):
        return put(np.pad(np.asarray(x), empty), BATCH)

    def by_row(x):
        return put(np.pad(x, ((0, 0), empty, (0, 0))), None, BATCH, HEADS if x.shape[2] == heads else None)

    zero = np.zeros((layers, len(due), heads), np.int32)
    return Quota(
        due=by_sequence(due),
        count=by_row(counts.astype(np.int32)),
        pinned=by_row(schedule.shares.pins(counts)),
        since=by_row(zero) if since is None else since,
        dropped=by_sequence(np.array(dropped, np.int32)),
        ahead=by_sequence(np.zeros(len(due), np.int32)),
        last=by_sequence(last.astype(np.int32)),
        first=by_sequence(first.astype(np.int32)),
        floor=put(np.float32(schedule.budget.floor)),
    )
