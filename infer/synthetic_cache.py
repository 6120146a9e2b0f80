"""Caches of random entries, as full as a context would leave them. Decoding is timed with them without reading it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache import Cache, Layout, ring_pages
from kvjax.inference.allocation import laid_out, layout_for, sizes_of
from kvjax.models.decoder import Decoder
from kvjax.policies import Policy
from kvjax.policies.compiled import CompiledPolicy
from kvjax.policies.selection.quest import Quest
from pallas_kernels.bits import as_bits


def synthetic_caches(
    model: Decoder, policy: CompiledPolicy, batch: int, longest: int, new_tokens: int, page_size: int
) -> Callable[[int], Cache]:
    """Return a function that makes a cache of `batch` sequences after a prefill of up to `longest` tokens each.

    The cache has space for decoding `new_tokens`. All caches have the same shape. The mesh must have one device. Head
    caches of a policy that admits only some tokens hold between 0.5 and 1.5 times their share.
    """
    config, host, rng = model.config, policy.host, np.random.default_rng(0)
    layout = layout_for(
        host, **sizes_of(config), batch=batch, tokens=longest + new_tokens, dtype=model.dtype,
        page_size=page_size,
    )  # fmt: skip
    shape = layout.layers, batch, layout.kv_heads
    unevenness = rng.uniform(0.5, 1.5, shape)
    window_pages, group = ring_pages(layout.window, page_size), config.num_heads // config.num_kv_heads

    def pages_of(length: Int[np.ndarray, "l b k"]) -> Int[np.ndarray, "l b k"]:
        return -(-length // page_size)

    def lengths(context: int) -> Int[np.ndarray, "l b k"]:
        return retained(host, layout, context, unevenness)

    pages = int((window_pages + pages_of(lengths(longest) + new_tokens)).sum())
    layout, one_page = dataclasses.replace(layout, pages=pages), dataclasses.replace(layout, pages=1)

    def make(context: int) -> Cache:
        cache, length = laid_out(policy.decode, one_page, group), lengths(context)
        columns = np.arange(cache.layers.page_table.shape[-1])
        used = (columns < ring_pages(min(layout.window, context + 1), page_size)) | (
            (columns >= window_pages) & (columns < window_pages + pages_of(length)[..., None])
        )
        ids = rng.permutation(pages).astype(np.int32)
        table = np.full(used.shape, pages, np.int32)
        count = int(used.sum())
        table[used], free = ids[:count], np.roll(ids, -count)
        put = functools.partial(jax.tree.map, lambda new, old: jax.device_put(new, old.sharding))
        pool, bounds = jax.jit(_entries, static_argnums=1)(jax.random.key(context), layout)
        metadata = {name: np.zeros((pages, page_size), dtype) for name, dtype in layout.metadata}
        stored = dataclasses.replace(
            cache.pages,
            pool=pool,
            free=free,
            free_count=np.array([pages - count], np.int32),
            bounds=bounds,
            metadata=metadata,
        )
        priority = rng.random(cache.layers.priority.shape, np.float32)
        layers = dataclasses.replace(
            cache.layers, page_table=table, length=length.astype(np.int32), priority=priority
        )
        seen = np.full(batch, context, np.int32)
        return put(dataclasses.replace(cache, pages=stored, layers=layers, seen=seen), cache)

    return make


def bytes_read(policy: CompiledPolicy, cache: Cache, context: int) -> float:
    """Return the bytes that a decoded token of each sequence reads: entries and, for Quest, the bounds of pages."""
    pool, length = cache.pages.pool, np.asarray(cache.layers.length)
    local = min(context, cache.window - 1)
    selection, read, bounds = policy.host.selection, length, 0
    if isinstance(selection, Quest):
        chosen = np.max(selection.tokens) + np.max(selection.ratio) * context
        read = np.minimum(length, max(chosen - local, 0))
        bounds = (length / cache.page_size).sum()
    return float((read.sum() + length.size * local + bounds) * pool.shape[2] * pool.dtype.itemsize)


def retained(
    policy: Policy, layout: Layout, context: int, unevenness: Float[np.ndarray, "l b k"]
) -> Int[np.ndarray, "l b k"]:
    """Return the number of retained entries of each head cache (without the local window) after `context` tokens."""
    local = min(context, layout.window - 1)
    distant = context - local
    admitted = np.broadcast_to(policy.admission.admitted(distant)[:, None], unevenness.shape)
    kept = np.where(admitted < distant, admitted * unevenness, admitted)
    if policy.max_entries is not None:
        kept = np.minimum(kept, policy.max_entries)
    if policy.schedule is not None:
        token_bytes = 2 * layout.head_dim * layout.dtype.itemsize * layout.layers * layout.kv_heads
        kept = np.minimum(kept, policy.schedule.allowance([context], token_bytes)[0] - local)
    return np.clip(kept, 0, distant).astype(int)


def _entries(key: Any, layout: Layout) -> tuple[Array, Array | None]:
    """Return a pool that repeats up to 1000 random pages, and the bounds of its pages' keys, if it has bounds."""
    distinct = min(layout.pages, 1000)
    part = jax.random.normal(key, (distinct, layout.page_size, 2 * layout.head_dim), layout.dtype)
    k = part[..., : layout.head_dim].astype(layout.bounds or layout.dtype)
    bounds = jnp.concatenate([k.min(1), -k.max(1)], -1)
    part = part if layout.stored == layout.dtype else as_bits(part)
    page = jnp.arange(layout.pages) % distinct
    return part[page], None if layout.bounds is None else bounds[page]
