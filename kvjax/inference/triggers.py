"""The triggers of evictions: while prompts are read, at their end, and while answers are decoded.

The host decides when to compact, from the policy's schedule and the cache's real lengths.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from kvjax.cache import Cache, check
from kvjax.inference.allocation import free_pages, grow, may_grow, more_pages, pool_pages
from kvjax.inference.compaction import compact_to, overflow_quota, quota, range_quota
from kvjax.inference.decode import Recurring
from kvjax.inference.footprint_log import log_call
from kvjax.inference.forward import bucket, memories, padded
from kvjax.inference.reconstruction import CacheSteps, passes_of, reconstruct
from kvjax.inference.refitting import References, refit
from kvjax.mesh import on_host, put
from kvjax.models.decoder import Decoder
from kvjax.policies.base import Observations, Reconstruction
from kvjax.policies.compiled import CompiledPolicy, States
from kvjax.policies.eviction.refit import refitting
from kvjax.policies.eviction.wrapper import innermost
from kvjax.policies.policy import Policy
from kvjax.policies.schedule import Schedule

TokenRows = Sequence[Int[np.ndarray, " _"]]
"""Token ids, one row per sequence."""
Feed = Callable[[Cache, TokenRows], tuple[Cache, Any]]
"""`feed`, bound to a model and a policy."""


def at_prompt_end(
    model: Decoder,
    policy: CompiledPolicy,
    cache: Cache,
    rows: TokenRows,
    run: Feed,
    observers: TokenRows | None = None,
    reconstructed: bool = False,
) -> CacheSteps:
    """Return the steps that compact the cache (donated) of the prompts `rows` once, as the policy's schedule says: each
    reconstruction pass, the observers, and the compaction, after which the entries may be refitted.

    Args:
        run: `feed`, to read the observers with.
        observers: as in `kvjax.inference.prefill.read`.
        reconstructed: True if all reconstruction passes have been made (`reconstruct`).
    """
    host, dropped = policy.host, [0] * len(rows)
    schedule, refitted = host.schedule, refitting(host.eviction)
    assert schedule is not None
    references = None
    if refitted is not None:
        passes, batch = [passes_of(host, row) for row in rows], cache.seen.shape[0]
        references = References(model, passes, refitted.queries, batch)
    # before the observers are read, which the passes would see
    if references is not None or (isinstance(innermost(host.eviction), Reconstruction) and not reconstructed):
        cache = yield from reconstruct(model, policy, cache, rows, references)
        cache = yield cache
    if references is not None:
        references.look_at(cache)
    if schedule.in_ranges:
        stays = range_quota(host, cache, rows)
    else:
        observers = guidance(schedule, len(rows)) if observers is None else observers
        if any(row.size for row in observers):
            cache, dropped = _after_observers(model, policy, cache, observers, run)
            cache = yield cache
        prefix = [schedule.needs.prefix_of(row) for row in rows]
        stays = quota(host, cache, [row.size for row in rows], dropped=dropped, prefix=prefix)
    cache = compact_to(model, policy, cache, stays)
    return cache if references is None else refit(cache, references)


def guidance(schedule: Schedule, sequences: int) -> TokenRows:
    """Return the schedule's guidance for each sequence: tokens that observe its end, which may be empty."""
    return [np.asarray(schedule.trigger.guidance, np.int32)] * sequences


def _after_observers(
    model: Decoder, policy: CompiledPolicy, cache: Cache, observers: TokenRows, run: Feed
) -> tuple[Cache, list[int]]:
    """Return the cache (donated) after it read `observers`, and how many of each sequence's newest entries are theirs.
    With an admission the observers write nothing, since it might drop them, and they would push the oldest tokens out
    of its window. Only the eviction's memories change then."""
    sizes = [row.size for row in observers]
    if not any(sizes):
        return cache, sizes
    if policy.read.stores_all:
        windows = None if cache.sliding is None else jnp.copy(cache.sliding)
        cache, _ = run(cache, observers)
        # the observers' entries are dropped later, but here they would replace the last tokens
        cache = dataclasses.replace(cache, sliding=windows)
    else:
        log_call(cache, observers)
        tokens, valid = padded(list(observers), bucket(max(sizes)))
        *memories_after, count = memories(model, policy.read, cache, tokens, valid)
        pages = dataclasses.replace(cache.pages, free_count=count)
        cache = _with_memories(dataclasses.replace(cache, pages=pages), *memories_after)
    return cache, sizes if policy.read.stores_all else [0] * len(sizes)


def evict_to_budget(
    model: Decoder, policy: CompiledPolicy, cache: Cache, rows: Bool[np.ndarray, " b"]
) -> Cache:
    """Return the cache after the sequences in `rows` that are over their budgets were compacted."""
    host, schedule, seen = policy.host, policy.host.schedule, on_host(cache.seen)[: len(rows)]
    assert schedule is not None
    allowed = schedule.allowance(seen.tolist(), cache.entry_bytes)
    due = rows & [
        schedule.due(n, share, cache.window - 1) for n, share in zip(seen.tolist(), allowed, strict=True)
    ]
    if schedule.trigger.when == "overflow":
        over = np.maximum(_entries_over(host, cache, len(rows)), 0) * due
        return compact_to(model, policy, cache, overflow_quota(host, cache, over)) if over.any() else cache
    if not due.any():
        return cache
    local = _in_window(cache, len(rows))
    return compact_to(model, policy, cache, quota(host, cache, seen.tolist(), due=due.tolist(), local=local))


def after_chunk(
    model: Decoder,
    policy: CompiledPolicy,
    cache: Cache,
    rows: TokenRows,
    observers: TokenRows,
    start: int,
    before: Int[Array, "l b k"] | None,
    run: Feed,
) -> Cache:
    """Return the cache (donated), compacted after the chunk of `rows` that begins at `start`.

    Args:
        before: lengths of the head caches before the chunk, if only the chunk's own entries compete; else None.
        observers, run: as in `at_prompt_end`.
    """
    host, schedule = policy.host, policy.host.schedule
    assert schedule is not None
    stop = start + schedule.trigger.chunk
    if schedule.in_ranges:
        return compact_to(model, policy, cache, range_quota(host, cache, rows, stop, start))

    def observers_of(row, given):
        if start < row.size <= stop or (schedule.trigger.guidance and row.size > stop):
            return given
        patched = schedule.trigger.patched and row.size > stop
        return np.concatenate([row, given])[-schedule.needs.observed :] if patched else row[:0]

    chunk_observers = [observers_of(row, given) for row, given in zip(rows, observers, strict=True)]
    any_observers = any(row.size for row in chunk_observers)
    memories_before = (
        jax.tree.map(jnp.copy, (cache.layers.state, cache.observations)) if any_observers else ()
    )
    cache, dropped = _after_observers(model, policy, cache, chunk_observers, run)
    seen = [min(row.size, stop) for row in rows]
    stays = quota(
        host,
        cache,
        [max(0, count - start) if schedule.by_chunk else count for count in seen],
        due=[count > start for count in seen],
        since=before,
        dropped=dropped,
    )
    cache = compact_to(model, policy, cache, stays)
    return _with_memories(cache, *memories_before) if any_observers else cache


def _with_memories(cache: Cache, states: States, observations: Observations) -> Cache:
    """Return the cache with these memories of the methods."""
    return dataclasses.replace(
        cache, layers=dataclasses.replace(cache.layers, state=states), observations=observations
    )


def recurring(host: Policy, cache: Cache) -> Recurring | None:
    """Return the compaction that runs inside the decoding loop; None if the policy has none."""
    schedule = host.schedule
    if schedule is None or schedule.trigger.when != "position":
        return None
    # the budget does not depend on the length, so that of the longest is right for all: one whose sum over all heads,
    # which may share the budget, fits into int32
    layers, batch, heads = cache.layers.length.shape
    stays = quota(host, cache, [(2**31 - 1) // (layers * heads)] * batch)
    how = {"over": schedule.shares.over, "ties": schedule.ties, "observed": schedule.needs.observed}
    return Recurring(stays, put(np.int32(schedule.trigger.every)), **how)


SMALL_BLOCK = 4
"""Tokens of the smaller block, which decodes the end of an answer."""


def block_size(tokens: int, block: int) -> int:
    """Return the size of the compiled block that decodes `tokens` tokens, or the first of them: `block` or
    `SMALL_BLOCK`, so that answers of all lengths run the same programs. Less than half a block of tokens is dropped."""
    return block if 2 * tokens > block else min(SMALL_BLOCK, block)


def next_block(
    host: Policy, cache: Cache, running: Bool[np.ndarray, " b"], fed: int, new_tokens: int, block: int
) -> tuple[int, int, Cache]:
    """Return how many of `new_tokens` tokens can be decoded before a compaction may be due, the `block_size` for them,
    and the cache with pages for them.

    Args:
        running: the sequences that continue.
        fed: tokens decoded so far.
    """
    schedule, due = host.schedule, new_tokens
    when = None if schedule is None else schedule.trigger.when
    if schedule is not None and when == "every":
        due = schedule.trigger.every - fed % schedule.trigger.every
    elif when == "overflow":
        layers, _, heads = cache.layers.length.shape
        over = _entries_over(host, cache, len(running))[running]
        # a token adds at most one entry to a head cache
        due = max(1, int(-over.max()) // (layers * heads))
    # a single token if a compaction follows it
    size = 1 if due == 1 and when in ("every", "overflow") else block_size(min(due, new_tokens), block)
    count = min(due, new_tokens, size)
    # check before the pool grows: its new pages would hide a debt
    check(cache, host.name, new_tokens)
    if may_grow(cache) and (short := more_pages(host, cache, count) - free_pages(cache)) > 0:
        further = new_tokens - count
        if schedule is not None and schedule.trigger.while_decoding:
            further = min(due, schedule.trigger.every or due)
        cache = grow(host, cache, pool_pages(cache) + short, count, further)
    return count, size, cache


def after_block(
    model: Decoder, policy: CompiledPolicy, cache: Cache, running: Bool[np.ndarray, " b"], fed: int
) -> Cache:
    """Return the cache, compacted if a compaction is due for any of the sequences that are still `running`."""
    schedule = policy.host.schedule
    if schedule is None or schedule.trigger.when not in ("every", "overflow") or not running.any():
        return cache
    if schedule.trigger.when == "every" and fed % schedule.trigger.every:
        return cache
    return evict_to_budget(model, policy, cache, running)


def _in_window(cache: Cache, sequences: int) -> Int[np.ndarray, " b"]:
    """Return the tokens in each sequence's local window, which dropped tokens have left."""
    return np.minimum(on_host(cache.counted)[:sequences], cache.window - 1)


def _entries_over(host: Policy, cache: Cache, sequences: int) -> Int[np.ndarray, " b"]:
    """Return the number of retained entries by which each sequence is over its budget."""
    layers, _, heads = cache.layers.length.shape
    assert host.schedule is not None
    seen = on_host(cache.seen)[:sequences]
    allowed = host.schedule.allowance(seen.tolist(), cache.entry_bytes) - _in_window(cache, sequences)
    stored = on_host(cache.layers.length)[:, :sequences].sum((0, 2))
    return stored - np.floor(layers * heads * np.maximum(allowed, 0)).astype(np.int64)
