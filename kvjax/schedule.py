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


def read(model, policy, cache, rows, room, chunk, calls=None, implementation=None, observers=None):
    """Read `rows` into an empty cache, compacted as planned, with space for `room` more tokens; returns as `feed`.

    observers: tokens that are read behind the end of each row for an eviction to look with, and leave nothing.
    """
    run = functools.partial(feed, model, policy, chunk=chunk, calls=calls, implementation=implementation)
    plan = policy.plan
    if plan is None:
        return run(cache, rows, room=room)
    # at once, and not when a prompt or an answer has grown to it
    plan.check_bound(policy.name, cache.window - 1, entry_bytes(cache))
    plan.shares.check(model.config.num_layers)
    observers = [row[:0] for row in rows] if observers is None else observers
    logits = None
    if plan.schedule.in_chunks:
        for start in range(0, max(row.size for row in rows), plan.schedule.chunk):
            before = jnp.copy(cache.layers.length) if plan.by_chunk else None
            cache, logits = run(
                cache, [row[start : start + plan.schedule.chunk] for row in rows], logits=logits
            )
            cache = _after_chunk(model, policy, cache, rows, observers, start, before, run, calls)
    elif plan.schedule.while_decoding:
        cache, logits = run(cache, rows)
        cache = at_end(model, policy, cache, len(rows))
    else:
        cache, logits = run(cache, rows)
        cache = at_prompt_end(model, policy, cache, [row.size for row in rows], observers, run, calls)
    return _fitted(policy, cache, room), logits


def at_prompt_end(model, policy, cache, tokens, observers, run, calls=None):
    """The cache (donated) of prompts of so many tokens, compacted once as the policy plans. run: `feed` for it.
    observers: as in `read`."""
    cache, dropped = _observed(cache, observers, run, calls)
    return compacted(model, policy, cache, quota(policy, cache, tokens, dropped=dropped))


def _observed(cache, observers, run, calls):
    """The cache (donated) after `observers` were read behind it, and how many of each sequence's newest entries are
    theirs. An admission's ring would push its oldest tokens out for them: there they are read over a copy, of which
    only what the eviction saw stays."""
    sizes = [row.size for row in observers]
    if not any(sizes):
        return cache, sizes
    begun = 0 if calls is None else len(calls.passing)
    looked, _ = run(cache if cache.window == 1 else jax.tree.map(jnp.copy, cache), observers)
    if calls is not None:
        calls.passing[begun:] = [True] * (len(calls.passing) - begun)
    if cache.window == 1:
        return looked, sizes
    layers = dataclasses.replace(cache.layers, state=(cache.layers.state[0], looked.layers.state[1]))
    return dataclasses.replace(cache, layers=layers), [0] * len(sizes)


def at_end(model, policy, cache, sequences):
    """The cache after a prompt, or a question that continues one: compacted where a plan does so while decoding."""
    if policy.plan is None or not policy.plan.schedule.while_decoding:
        return cache
    return _brought_down(model, policy, cache, np.ones(sequences, bool))


def _brought_down(model, policy, cache, asked):
    """The cache with those of the sequences asked for brought down to their budgets that have more."""
    plan, seen = policy.plan, np.asarray(cache.seen)[: len(asked)]
    kept = plan.kept(seen.tolist(), entry_bytes(cache))
    due = asked & [plan.due(n, share, cache.window - 1) for n, share in zip(seen.tolist(), kept, strict=True)]
    if plan.schedule.when == "overflow":
        over = np.maximum(_entries_over(policy, cache, len(asked)), 0) * due
        return compacted(model, policy, cache, overflow_quota(policy, cache, over)) if over.any() else cache
    if not due.any():
        return cache
    return compacted(model, policy, cache, quota(policy, cache, seen.tolist(), due=due.tolist()))


def _after_chunk(model, policy, cache, rows, observers, start, before, run, calls):
    """The cache compacted once the chunk of `rows` that begins at `start` was read."""
    plan = policy.plan
    stop = start + plan.schedule.chunk

    def looking(row, behind):
        if start < row.size <= stop:
            return behind
        patched = plan.schedule.when == "patched" and row.size > stop
        return np.concatenate([row, behind])[-plan.observed :] if patched else row[:0]

    patch = [looking(row, behind) for row, behind in zip(rows, observers, strict=True)]
    looked = any(row.size for row in patch)
    state = jax.tree.map(jnp.copy, cache.layers.state) if looked else ()
    cache, dropped = _observed(cache, patch, run, calls)
    seen = [min(row.size, stop) for row in rows]
    kept = quota(
        policy,
        cache,
        [max(0, count - start) if plan.by_chunk else count for count in seen],
        due=[count > start for count in seen],
        since=before,
        dropped=dropped,
    )
    cache = compacted(model, policy, cache, kept)
    return (
        dataclasses.replace(cache, layers=dataclasses.replace(cache.layers, state=state)) if looked else cache
    )


def next_block(policy, cache, running, fed, block):
    """How many tokens, at most `block`, may be decoded before the cache must be looked at again, when `fed` were; and
    the cache, with room for them.

    A power of two where a plan decides, so that few programs are compiled.
    """
    plan = policy.plan
    if plan is None or not plan.schedule.while_decoding:
        return block, cache
    if plan.schedule.when == "every":
        left = plan.schedule.every - fed % plan.schedule.every
    else:
        layers, _, heads = cache.layers.length.shape
        over = _entries_over(policy, cache, len(running))[running]
        # a token adds at most one entry to a row
        left = max(1, int(-over.max()) // (layers * heads))
    count = 1 << (min(left, block).bit_length() - 1)
    short = 0 if cache.bounded else _pages_for(cache, count) - int(np.asarray(cache.pages.free_count).min())
    # what was planned for may not have come: a prompt too short to be compacted, a budget that is not met yet
    return count, cache if short <= 0 else _grown(cache, max(short, _pool(cache) // 4), 0)


def after_block(model, policy, cache, running, fed):
    """The cache, compacted if that is due for any of the sequences that are still `running`."""
    plan = policy.plan
    if plan is None or not plan.schedule.while_decoding or not running.any():
        return cache
    if plan.schedule.when == "every" and fed % plan.schedule.every:
        return cache
    return _brought_down(model, policy, cache, running)


def _entries_over(policy, cache, sequences):
    """By how many entries of the global region each sequence is over its budget."""
    layers, _, heads = cache.layers.length.shape
    seen = np.asarray(cache.seen)[:sequences]
    allowed = policy.plan.kept(seen.tolist(), entry_bytes(cache)) - np.minimum(seen, cache.window - 1)
    stored = np.asarray(cache.layers.length)[:, :sequences].sum((0, 2))
    return stored - np.floor(layers * heads * np.maximum(allowed, 0)).astype(np.int64)


def compacted(model, policy, cache, kept):
    """The cache (donated) after a compaction by a quota, compiled for its longest row, and for as many entries as are
    observed at least."""
    longest = int(np.asarray(cache.layers.length).max())
    if longest == 0:
        return cache
    plan = policy.plan
    entries = bucket(max(longest, plan.observed))
    return compact(model, policy.eviction, cache, kept, entries=entries, over=plan.shares.over)


# --- room for what is to come ----------------------------------------------------------------------------------------

_trimmed = jax.jit(caches.trimmed, static_argnums=1)
_grown = jax.jit(caches.grown, static_argnums=(1, 2))


def _pool(cache):
    """Pages of a shard."""
    return cache.pages.pool.shape[0] // len(np.asarray(cache.pages.free_count))


def _shard_sums(cache, rows):
    """Sums of an `[l b k]` array over each shard's rows."""
    shards = len(np.asarray(cache.pages.free_count))
    layers, _, heads = rows.shape
    tensor = shards // batch_shards()
    return rows.reshape(layers, batch_shards(), -1, tensor, heads // tensor).sum((0, 2, 4))


def _pages_for(cache, tokens):
    """The most pages of a shard that `tokens` more entries in each row take, beside those in use."""
    length = np.asarray(cache.layers.length)
    return int(
        _shard_sums(cache, -(-(length + tokens) // cache.page_size) - -(-length // cache.page_size)).max()
    )


def _wanted(policy, cache, asked, answered):
    """Pages of a shard for what is stored and, in each sequence, a question and an answer of so many tokens."""
    free, pool = int(np.asarray(cache.pages.free_count).min()), _pool(cache)
    used, tokens, plan = pool - free, asked + answered, policy.plan
    if tokens == 0:
        return max(used, 1)
    layers, batch, heads = cache.layers.length.shape
    # every row may start a page, and then takes what the policy admits of the new tokens
    kept = np.broadcast_to(policy.admission.admitted(tokens + cache.window) * caches.MARGIN, (layers, heads))
    each = np.ceil(np.minimum(kept, tokens) / cache.page_size) + 1
    tensor = len(np.asarray(cache.pages.free_count)) // batch_shards()
    need = used + batch // batch_shards() * caches.largest_shard(each, tensor)
    need = min(need, used + _pages_for(cache, tokens))
    if plan is None or not plan.schedule.while_decoding:
        return need
    # or what the budget lets stand, and what comes between two compactions
    between = asked + max(plan.schedule.every, 1)
    share = plan.kept([int(np.asarray(cache.seen).max()) + tokens], entry_bytes(cache))[0]
    budget = np.full(cache.layers.length.shape, -(-int(share + between) // cache.page_size) + 1)
    ring = caches.ring_pages(cache.window, cache.page_size)
    planned = int(_shard_sums(cache, budget + ring).max())
    return min(need, max(planned, used + _pages_for(cache, between)))


def _lacking(policy, cache, asked, answered):
    """Pages that the pool lacks of what is wanted, rounded up; below 0 if it has more, 0 if its size was stated."""
    need, have = _wanted(policy, cache, asked, answered), _pool(cache)
    rounded = caches.rounded_up(need)
    return 0 if cache.bounded or need <= have <= rounded else rounded - have


def _columns(cache, tokens):
    """Columns that the page table lacks for `tokens` more tokens; where it lacks any, of a number rounded up."""
    seen, longest = int(np.asarray(cache.seen).max()), int(np.asarray(cache.layers.length).max())
    most = min(max(seen + tokens - cache.window + 1, 0), longest + tokens)
    ring = caches.ring_pages(cache.window, cache.page_size)
    have, need = cache.layers.page_table.shape[-1], ring + -(-most // cache.page_size)
    return caches.rounded_up(need) - have if need > have else 0


def _fitted(policy, cache, tokens):
    """The cache with a pool as large as what is stored takes and so many decoded tokens, unless its size was stated."""
    lacking, columns = _lacking(policy, cache, 0, tokens), _columns(cache, tokens)
    if lacking < 0:
        cache = _trimmed(cache, _pool(cache) + lacking)
    if columns or lacking > 0:
        cache = _grown(cache, max(0, lacking), columns)
    return cache


def with_room(cache, policy, asked, answered):
    """A copy of `cache` that can take a question and an answer of so many tokens a sequence; its pool grows unless
    its size was stated."""
    lacking = _lacking(policy, cache, asked, answered)
    return _grown(cache, max(0, lacking), _columns(cache, asked + answered))
