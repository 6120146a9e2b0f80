"""Refit after a compaction (`kvjax.policies.eviction.refit`): the reference queries, their attention before the
compaction, and the new values and biases of the remaining entries."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import Cache, LayerCache, Pages, if_finite
from kvjax.cache.compaction import addresses
from kvjax.inference.forward import bucket
from kvjax.mesh import BATCH, HEADS, P, on_host, put, specs_of
from kvjax.models.decoder import Decoder
from kvjax.policies.base import BIAS, Pass
from kvjax.policies.eviction.refit import Target, fit, target
from kvjax.policies.views import Step

SPLIT = P(None, BATCH, HEADS)


class References:
    """The reference queries of a batch of prompts. Their tokens are spread evenly over a prompt's reconstruction
    passes, or are all of the passes' tokens if these are fewer."""

    def __init__(self, model: Decoder, passes: Sequence[Sequence[Pass]], queries: int, batch: int):
        """Choose the tokens of these passes, for a batch padded to `batch` sequences. `queries`: the number of queries
        of each kv head."""
        config = model.config
        count = max(1, queries * config.num_kv_heads // config.num_heads)
        self._index = np.full((max(map(len, passes), default=0), batch, count), -1, np.int32)
        for row, passes_of_row in enumerate(passes):
            ends = np.cumsum([0, *(x.tokens.size for x in passes_of_row)])
            slots = np.arange(min(count, ends[-1]))
            chosen = slots * ends[-1] // max(len(slots), 1)
            pass_index = np.searchsorted(ends, chosen, side="right") - 1
            self._index[pass_index, row, slots] = chosen - ends[pass_index]
        shape = config.num_full_layers, batch, config.num_heads, count, config.head_dim
        self.q: Float[Array, "l b n r h"] = put(np.zeros(shape, model.dtype), *SPLIT)
        """The queries after RoPE, in the model's dtype."""
        self.real: Bool[Array, "b r"] = put((self._index >= 0).any(0), BATCH)
        """True for queries that exist."""
        self.before: tuple[Int[Array, "l b k"], Target] | None = None
        """The length of the head caches before the compaction, and the attention to all their entries, `[l b k …]`."""

    def index(self, pass_index: int) -> Int[Array, "b r"]:
        """Return the index of each query's token in a pass; −1 for queries of other passes."""
        return put(self._index[pass_index], BATCH)

    def look_at(self, cache: Cache) -> None:
        """Compute the queries' attention to the cache before its compaction, after all passes."""
        if longest := int(on_host(cache.layers.length).max(initial=0)):
            attention = _targets(cache, self.q, entries=bucket(longest))
            self.before = jnp.copy(cache.layers.length), attention


def sampled(step: Step, index: Int[Array, "b r"]) -> Float[Array, "b n r h"]:
    """Return one layer's queries of the tokens at these indices."""

    def local(q, index):
        return jnp.take_along_axis(q, jnp.maximum(index, 0)[:, None, :, None], 2)

    return jax.shard_map(local, out_specs=P(BATCH, HEADS))(step.q, index)


def refit(cache: Cache, references: References) -> Cache:
    """Return the compacted cache (donated) with new values and biases of the entries. Head caches that lost no entry do
    not change."""
    longest = int(on_host(cache.layers.length).max(initial=0))
    if longest == 0 or references.before is None:
        return cache
    return _refitted(cache, references.q, references.real, *references.before, entries=bucket(longest))


@functools.partial(jax.jit, static_argnames="entries")
def _targets(cache: Cache, q: Float[Array, "l b n r h"], *, entries: int) -> Target:
    """Return the attention of the reference queries to each head cache `[l b k …]`, which has at most `entries`
    entries."""

    def local(pages, layers, q):
        def in_layer(_, xs):
            layer, q = xs
            return None, _by_head_cache(lambda stored, q: target(q, *stored), pages, layer, entries, q)

        return lax.scan(in_layer, None, (layers, by_kv_head(q, layers)))[1]

    return jax.shard_map(local, out_specs=SPLIT)(cache.pages, cache.layers, q)


@functools.partial(jax.jit, donate_argnums=0, static_argnames="entries")
def _refitted(
    cache: Cache,
    q: Float[Array, "l b n r h"],
    real: Bool[Array, "b r"],
    before: Int[Array, "l b k"],
    full: Target,
    *,
    entries: int,
) -> Cache:
    """Return the cache after refitting the head caches that have fewer entries than `before`."""

    def local(pages, layers, q, real, before, full):
        def refitted(stored, q, real, full):
            return fit(q, jnp.tile(real, len(q) // len(real)), full, *stored)

        def in_layer(pages, xs):
            layer, q, before, full = xs
            by_head = jnp.broadcast_to(real[:, None], (*layer.length.shape, real.shape[1]))
            v, bias = _by_head_cache(refitted, pages, layer, entries, q, by_head, full)
            page, offset = _places(pages, layer, entries)
            fitted = (jnp.arange(entries) < layer.length[..., None]) & (layer.length < before)[..., None]
            page = jnp.where(fitted, page, pages.pool.shape[0])
            pages = pages.with_values(page, offset, v, layer.key_scale)
            metadata = pages.metadata | {BIAS: pages.metadata[BIAS].at[page, offset].set(bias, mode="drop")}
            finite = jnp.isfinite(v).all(-1) & jnp.isfinite(bias)
            return dataclasses.replace(pages, metadata=metadata), finite | ~fitted

        pages, finite = lax.scan(in_layer, pages, (layers, by_kv_head(q, layers), before, full))
        return if_finite(pages, finite)

    specs = specs_of(cache.pages)
    arguments = cache.pages, cache.layers, q, real, before, full
    return dataclasses.replace(cache, pages=jax.shard_map(local, out_specs=specs)(*arguments))


def by_kv_head(q: Float[Array, "l b n r h"], layers: LayerCache) -> Float[Array, "l b k m h"]:
    """Return queries by kv head, one query head of the group after another."""
    return rearrange(q, "l b (k g) r h -> l b k (g r) h", k=layers.length.shape[2])


def _places(pages: Pages, layer: LayerCache, entries: int) -> tuple[Int[Array, "b k s"], Int[Array, "b k s"]]:
    """Return page and offset of the first `entries` places of each head cache. All tokens are retained, so there is no
    local window."""
    place = jnp.broadcast_to(jnp.arange(entries), (*layer.length.shape, entries))
    return addresses(layer, place, pages.pool.shape[1], 0)


def _by_head_cache(call: Callable[..., Any], pages: Pages, layer: LayerCache, entries: int, *xs: Any) -> Any:
    """Return `call(stored, *xs)` for each head cache of a layer, one after another, `[b k …]`. `stored` are its keys,
    its values and a mask of those that exist; `xs` are its parts of arrays `[b k …]`."""

    def of_head_cache(row):
        length, page, offset, key_scale, *parts = row
        key_scale = None if key_scale is None else key_scale[None, None]
        k, v = jnp.split(pages.entries(page[None, None], offset[None, None], key_scale)[0, 0], 2, -1)
        return call((k, v, jnp.arange(entries) < length), *parts)

    shape = layer.length.shape
    rows = layer.length, *_places(pages, layer, entries), layer.key_scale, *xs
    results = lax.map(of_head_cache, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows))
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), results)
