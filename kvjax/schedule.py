"""Evictions at their time: while prompts are read, at their end, and while answers are decoded.

The host decides when, from the policy's plan and the cache's real lengths; between two compactions it only looks on.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import cache as caches
from kvjax.compaction import compact, entry_bytes, overflow_quota, quota
from kvjax.feeding import bucket, feed
from kvjax.mesh import batch_shards


def read(model, policy, cache, rows, room, chunk, calls=None, implementation=None):
    """Prompts into an empty cache, compacted as the policy plans, with `room` for so many more tokens; as `feed`."""
    run = functools.partial(
        feed, model, policy.traced, chunk=chunk, calls=calls, implementation=implementation
    )
    plan = policy.plan
    if plan is None:
        return run(cache, rows)
    if not plan.schedule.in_chunks:
        at_end = _quota_at_end(policy, cache, rows)
        cache, logits = run(cache, rows)
        cache = within_bounds(model, policy, _compacted(model, policy, cache, at_end), len(rows))
        return cache if cache.bounded else _trimmed(cache, _pages_with_room(policy, cache, room)), logits
    logits = None
    for start in range(0, max(row.size for row in rows), plan.schedule.chunk):
        before = jnp.copy(cache.layers.length) if plan.by_chunk else None
        cache, logits = run(cache, [row[start : start + plan.schedule.chunk] for row in rows], logits=logits)
        cache = _after_chunk(model, policy, cache, rows, start, before, run, calls)
    # the pool was made for what is held while reading
    return cache if cache.bounded or not room else with_room(cache, policy, room), logits


def _quota_at_end(policy, cache, rows):
    """What stays of whole prompts; None for nothing to do. Made before anything is read: a context or a budget that
    does not suit the method is refused at once."""
    plan, lengths = policy.plan, np.array([row.size for row in rows])
    if not plan.schedule.while_decoding:
        return quota(policy, cache, lengths.tolist())
    plan.check_bound(policy.name, cache.window - 1, entry_bytes(cache))
    return None if plan.schedule.when == "overflow" else _periodic_quota(policy, cache, lengths, True)


def _periodic_quota(policy, cache, seen, asked):
    """What stays of those of the sequences asked for that have more than their budget; None: none has."""
    plan = policy.plan
    # a prompt that is too short to be looked at by its end is grown by its answer
    due = asked & (seen > plan.observed) & (seen > plan.kept(seen.tolist(), entry_bytes(cache)))
    return quota(policy, cache, seen.tolist(), due=due.tolist()) if due.any() else None


def _after_chunk(model, policy, cache, rows, start, before, run, calls):
    """The cache compacted once the chunk of `rows` that begins at `start` was read."""
    plan = policy.plan
    stop = start + plan.schedule.chunk
    patched = plan.schedule.when == "patched"
    patch = [row[-plan.observed :] if patched and row.size > stop else row[:0] for row in rows]
    looked = any(row.size for row in patch)
    if looked:
        state = jax.tree.map(jnp.copy, cache.layers.state)
        cache, _ = run(cache, patch)
        if calls is not None:
            calls.dropped = calls.dropped + np.array([row.size for row in patch])
    seen = [min(row.size, stop) for row in rows]
    kept = quota(
        policy,
        cache,
        [max(0, count - start) if plan.by_chunk else count for count in seen],
        due=[count > start for count in seen],
        since=before,
        dropped=[row.size for row in patch],
    )
    cache = _compacted(model, policy, cache, kept)
    return (
        dataclasses.replace(cache, layers=dataclasses.replace(cache.layers, state=state)) if looked else cache
    )


def next_block(policy, cache, running, fed, block):
    """How many tokens, at most `block`, may be decoded before the cache must be looked at again, when `fed` were.

    A power of two where a plan decides, so that few programs are compiled.
    """
    plan = policy.plan
    if plan is None or not plan.schedule.while_decoding:
        return block
    if plan.schedule.when == "every":
        left = plan.schedule.every - fed % plan.schedule.every
    else:
        layers, _, heads = cache.layers.length.shape
        over = _entries_over(policy, cache, len(running))[running]
        # a token adds at most one entry to a row
        left = max(1, int(-over.max()) // (layers * heads))
    return 1 << (min(left, block).bit_length() - 1)


def after_block(model, policy, cache, running, fed):
    """The cache, compacted if that is due for any of the sequences that are still `running`."""
    plan = policy.plan
    if plan is None or not plan.schedule.while_decoding or not running.any():
        return cache
    if plan.schedule.when == "overflow":
        return within_bounds(model, policy, cache, len(running), running)
    if fed % plan.schedule.every:
        return cache
    seen = np.asarray(cache.seen)[: len(running)]
    return _compacted(model, policy, cache, _periodic_quota(policy, cache, seen, running))


def within_bounds(model, policy, cache, sequences, running=True):
    """The cache with no more entries than a schedule of overflows allows its first sequences."""
    plan = policy.plan
    if plan is None or plan.schedule.when != "overflow":
        return cache
    while True:
        seen = np.asarray(cache.seen)[:sequences]
        due = (_entries_over(policy, cache, sequences) > 0) & (seen > plan.observed) & running
        before = np.asarray(cache.layers.length).sum()
        if not due.any():
            return cache
        cache = _compacted(model, policy, cache, overflow_quota(policy, cache, due.tolist()))
        if np.asarray(cache.layers.length).sum() == before:  # rows of a few entries have no tenth to lose
            return cache


def _entries_over(policy, cache, sequences):
    """By how many entries of the global region each sequence is over its budget."""
    layers, _, heads = cache.layers.length.shape
    seen = np.asarray(cache.seen)[:sequences]
    allowed = policy.plan.kept(seen.tolist(), entry_bytes(cache)) - np.minimum(seen, cache.window - 1)
    stored = np.asarray(cache.layers.length)[:, :sequences].sum((0, 2))
    return stored - np.floor(layers * heads * np.maximum(allowed, 0)).astype(np.int64)


def _compacted(model, policy, cache, kept):
    if kept is None:
        return cache
    longest = int(np.asarray(cache.layers.length).max())
    return compact(model, policy.eviction, cache, kept, entries=bucket(longest), over=policy.plan.shares.over)


# --- room for what is to come ----------------------------------------------------------------------------------------

_trimmed = jax.jit(caches.trimmed, static_argnums=1)
_grown = jax.jit(caches.grown, static_argnums=(1, 2))


def _pages_with_room(policy, cache, tokens):
    """Pages of a shard that what is stored takes and, in any row, so many more tokens, as far as the plan lets them."""
    free = np.asarray(cache.pages.free_count)
    pool, rows = cache.pages.pool.shape[0] // len(free), cache.layers.length.size // len(free)
    most = -(-tokens // cache.page_size) + 1 if tokens else 0
    return min(pool, pool - int(free.min()) + rows * most, _pages_allowed(policy, cache, tokens))


def _pages_allowed(policy, cache, tokens, unplanned=0):
    """Pages of a shard that its rows can ever take in the next `tokens` decoded tokens, if the plan compacts them
    meanwhile; `unplanned` tokens come before any compaction."""
    plan = policy.plan
    if plan is None or not plan.schedule.while_decoding:
        return np.inf
    layers, batch, heads = cache.layers.length.shape
    shards = len(np.asarray(cache.pages.free_count))
    batch, own = batch // batch_shards(), heads // (shards // batch_shards())
    ring = caches.ring_pages(cache.window, cache.page_size)
    seen = int(np.asarray(cache.seen).max())
    kept = plan.kept([seen + tokens], entry_bytes(cache))[0]
    # heads that compete may leave all of a budget to those of one shard
    even = plan.schedule.when == "every" and plan.shares.over == "head" and plan.shares.pyramid is None
    between = max(plan.schedule.every, 1) + unplanned
    entries = layers * batch * ((own if even else heads) * kept + own * between)
    return int(entries // cache.page_size) + layers * batch * own * (ring + 1)


def with_room(cache, policy, tokens, new=0):
    """A copy of `cache` that can take `tokens` more tokens a sequence, the last `new` of them decoded; its pool grows
    unless its size was stated."""
    page_size = cache.page_size
    seen = int(np.asarray(cache.seen).max())
    ring, table = caches.ring_pages(cache.window, page_size), cache.layers.page_table
    columns = ring + -(-max(seen + tokens - cache.window + 1, 0) // page_size) - table.shape[-1]
    pages = 0
    if not cache.bounded:
        layers, batch, heads = cache.layers.length.shape
        free = int(np.asarray(cache.pages.free_count).min())
        rows = (layers, batch // batch_shards(), heads)
        # every row may start a page, and then takes what the policy admits of the new tokens
        kept = np.broadcast_to(policy.admission.admitted(tokens + cache.window) * caches.MARGIN, rows[::2])
        each = -(-np.minimum(kept, tokens) // page_size) + 1
        shards = len(np.asarray(cache.pages.free_count))
        pool = cache.pages.pool.shape[0] // shards
        need = pool - free + rows[1] * caches.largest_shard(each, shards // batch_shards())
        pages = max(0, min(need, _pages_allowed(policy, cache, new, tokens - new)) - pool)
    return _grown(cache, int(pages), max(columns, 0))
