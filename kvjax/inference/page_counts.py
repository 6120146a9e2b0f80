"""Pages of a cache, counted on the host: of each shard, or of the shard that has most of them, or fewest free ones."""

import numpy as np
from jaxtyping import Int

from kvjax import cache as caches
from kvjax.cache import Cache
from kvjax.mesh import batch_shards
from kvjax.policies.policy import Policy


def pool_pages(cache: Cache) -> int:
    """Pages of a shard."""
    return cache.pages.pool.shape[0] // len(np.asarray(cache.pages.free_count))


def by_own_heads(cache: Cache, rows: Int[np.ndarray, "l b k"]) -> Int[np.ndarray, "batch_shards head_shards"]:
    """Sums of an `[l b k]` array over each shard's rows."""
    shards = len(np.asarray(cache.pages.free_count))
    layers, _, heads = rows.shape
    parts = shards // batch_shards()
    return rows.reshape(layers, batch_shards(), -1, parts, heads // parts).sum((0, 2, 4))


def more_pages(cache: Cache, tokens: int, most: int | None = None) -> int:
    """The most pages of a shard that `tokens` more tokens of each sequence take, beside those in use, in rows of at
    most `most` entries behind their rings."""
    length, seen = np.asarray(cache.layers.length), np.asarray(cache.seen)[:, None]
    leaving = np.maximum(seen + tokens - cache.window + 1, 0) - np.maximum(seen - cache.window + 1, 0)
    longer = length + leaving
    if most is not None:
        longer = np.maximum(np.minimum(longer, most), length)
    rings = rings_pages(cache, tokens) - rings_pages(cache)
    stored = -(-longer // cache.page_size) - -(-length // cache.page_size)
    return int(by_own_heads(cache, rings + stored).max())


def rings_pages(cache: Cache, tokens: int = 0) -> Int[np.ndarray, "l b k"]:
    """Pages of each row's ring once its sequence has `tokens` more."""
    seen = np.asarray(cache.seen)[:, None] + tokens
    rings = caches.ring_pages(np.minimum(seen + 1, cache.window), cache.page_size)
    return np.broadcast_to(rings, cache.layers.length.shape)


def copied_pages(policy: Policy, cache: Cache) -> int:
    """The most pages of a shard that branches of a context copy before they run."""
    if cache.pages.others is None:
        return 0
    length, newest = np.asarray(cache.layers.length), policy.rewritten
    read_only = 0 if newest is None else np.maximum(length - newest, 0) // cache.page_size
    return int(by_own_heads(cache, -(-length // cache.page_size) - read_only + rings_pages(cache)).max())


def shared_pages(cache: Cache) -> int:
    """The most pages of a shard that would be copied if no row held another's."""
    if cache.pages.others is None:
        return 0
    return int(
        np.asarray(cache.pages.others).reshape(len(np.asarray(cache.pages.free_count)), -1).sum(1).max()
    )


def free_pages(cache: Cache) -> int:
    """The fewest free pages of a shard; below 0: it ran out, and owes so many. Raises UserError if something that was
    computed was not finite."""
    return int(caches.free_counts(cache).min())
