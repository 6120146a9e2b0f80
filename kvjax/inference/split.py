"""How the devices that split the kv heads share a cache's rows: each has those of its own heads, or of all rows every
so many pages (`kvjax.cache.stripes`).

Split by pages no device waits for another's heads, for two collectives a layer. Rows then can only grow: what is still
to be compacted, or does more with entries than attend to them, is split by heads.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

from kvjax.cache import Cache, CapacityError, device_bytes, free_counts
from kvjax.cache.stripes import by_heads, striped
from kvjax.errors import UserError, one_of
from kvjax.inference.page_counts import pages_in_use, pool_pages
from kvjax.inference.settled import settled
from kvjax.mesh import HEADS, axis_size, batch_shards
from kvjax.policies.policy import Policy

SPLITS = "heads", "pages", "auto"
"""auto: by pages if that is worth two collectives a layer (`WORTH`)."""
WORTH = 8 * 2**20
"""Bytes of which a layer's decoding has to read fewer: a v5e reads them in 10 µs, about what two small collectives
take."""
ROW = 160 * 2**10
"""Bytes that a v5e reads while it issues what the shortest row of a kernel takes, 300 bundles."""

_striped = jax.jit(striped, static_argnums=1)
_by_heads = jax.jit(by_heads, static_argnums=1)


def check_split(policy: Policy, split: str) -> None:
    """Raises UserError for a word that is none of `SPLITS`, and for a policy whose rows cannot be split by pages."""
    one_of("cache", "split", split, SPLITS)
    if split == "pages" and (why := policy.refuses_pages):
        raise UserError(
            f"policy {policy.name} {why}: its cache cannot be split by pages, say split='heads' or 'auto'"
        )


def from_the_start(policy: Policy, split: str, tokens: Sequence[int], config: Any, dtype: Any) -> bool:
    """Whether the cache of sequences of so many tokens is split by pages before anything is read, by what the policy is
    expected to keep: never if something will be compacted, and rows are to be whole for it."""
    if policy.plan is not None or policy.refuses_pages or axis_size(*HEADS) == 1:
        return False
    if split != "auto":
        return split == "pages"
    rows = config.num_layers, config.num_kv_heads
    width = 2 * config.head_dim * jnp.dtype(dtype).itemsize
    expected = [policy.expected_entries(count, rows[0] * rows[1] * width) for count in tokens]
    expected += [np.zeros(rows)] * (-len(expected) % batch_shards())
    return excess(np.stack([np.broadcast_to(x, rows) for x in expected], 1), width) >= WORTH


def once_read(policy: Policy, cache: Cache, split: str) -> Cache:
    """The cache (donated), split as it stays: its prompts were read, and compacted. By heads, if a pool whose size was
    stated has no pages for what rows split by pages take; with "auto" also if devices cannot hold both pools, or if
    programs are shared by all lengths, which may not differ by what one prompt leaves.

    Raises CapacityError if they cannot.
    """
    if split == "heads" or cache.striped or policy.refuses_pages or axis_size(*HEADS) == 1:
        return cache
    entry_bytes = cache.pages.pool.shape[-1] * cache.pages.pool.dtype.itemsize
    if split == "auto" and (cache.shared or excess(np.asarray(cache.layers.length), entry_bytes) < WORTH):
        return cache
    free_counts(cache)
    cache = settled(cache, policy.continuing)
    need = pages_in_use(cache, striped=True)
    if cache.bounded or cache.shared:
        if need > pool_pages(cache):
            return cache
        need = pool_pages(cache)
    size, free = _beside(cache, need)
    if size > free and split == "auto":
        return cache
    if size > free:
        raise CapacityError(
            f"policy {policy.name}: a cache split by pages takes {size / 2**20:.1f} MiB on a device beside the one "
            f"that it is made of, which has {free / 2**20:.1f} MiB free: say split='heads', or give it more devices"
        )
    return _striped(cache, need)


def _beside(cache: Cache, pages: int) -> tuple[int, int]:
    """Bytes of another pool of so many pages of a device, and those that are free for it."""
    return pages * cache.pages.nbytes // cache.pages.pool.shape[0], device_bytes(free=True)


def split_by_heads(cache: Cache) -> Cache:
    """A copy of a cache that is split by pages, for what needs rows as a whole; any other as it is. Raises
    CapacityError if devices cannot hold both pools."""
    if not cache.striped:
        return cache
    need = pages_in_use(cache, striped=False)
    if cache.shared:
        need = max(need, pool_pages(cache))
    size, free = _beside(cache, need)
    if size > free:
        raise CapacityError(
            f"cache: what is asked of it needs rows split by heads, {size / 2**20:.1f} MiB on a device beside those "
            f"that are split by pages, and it has {free / 2**20:.1f} MiB free: make it with split='heads'"
        )
    return _by_heads(cache, need)


def excess(entries: Shaped[np.ndarray, "l b k"], entry_bytes: int) -> float:
    """Bytes that the device whose heads have most reads in a layer beyond those of rows split by pages, by the layers'
    mean. A row takes as long as `ROW` at least: by pages a device has a part of all heads' rows, and its own rings."""
    layers, _, heads = entries.shape
    parts = axis_size(*HEADS)
    rows = entries.reshape(layers, batch_shards(), -1, parts, heads // parts) * float(entry_bytes)
    by_heads = np.maximum(rows, ROW).sum((2, 4)).max((1, 2))
    rings = rows.shape[2] * rows.shape[4] * ROW
    by_pages = np.maximum(rows / parts, ROW).sum((2, 3, 4)).max(1) + rings
    return float((by_heads - by_pages).mean())
