"""Refit of the entries that a compaction left (`kvjax.policies.eviction.refit`): its reference queries, their attention
before the compaction, and the new values and biases after it."""

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
from kvjax.mesh import BATCH, HEADS, P, on_host, put
from kvjax.models.decoder import Decoder
from kvjax.policies.base import BIAS, Pass
from kvjax.policies.eviction.refit import Target, fit, target
from kvjax.policies.views import Step

SPLIT = P(None, BATCH, HEADS)


class References:
    """The reference queries of some prompts: those of tokens that are spread evenly over a prompt's reconstruction
    passes, or of all of them if these are fewer."""

    def __init__(self, model: Decoder, passes: Sequence[Sequence[Pass]], queries: int, batch: int):
        """Make room for the queries of prompts with these passes, in a batch padded to `batch` sequences. `queries`:
        the number for each kv head."""
        config = model.config
        count = max(1, queries * config.num_kv_heads // config.num_heads)
        self._index = np.full((max(map(len, passes), default=0), batch, count), -1, np.int32)
        for row, own in enumerate(passes):
            ends = np.cumsum([0, *(one.tokens.size for one in own)])
            slots = np.arange(min(count, ends[-1]))
            chosen = slots * ends[-1] // max(len(slots), 1)
            of = np.searchsorted(ends, chosen, side="right") - 1
            self._index[of, row, slots] = chosen - ends[of]
        shape = config.num_full_layers, batch, config.num_heads, count, config.head_dim
        self.q: Float[Array, "l b n r h"] = put(np.zeros(shape, model.dtype), *SPLIT)
        """The queries after RoPE, in the model's dtype."""
        self.real: Bool[Array, "b r"] = put((self._index >= 0).any(0), BATCH)
        """True for places that hold a query once all passes were read."""
        self.before: tuple[Int[Array, "l b k"], Target] | None = None
        """The length of the head caches before the compaction, and the attention to all their entries, `[l b k …]`."""

    def index(self, of: int) -> Int[Array, "b r"]:
        """Return the indices of a pass's tokens whose queries are taken; negative for the places of others."""
        return put(self._index[of], BATCH)

    def look_at(self, cache: Cache) -> None:
        """Keep what `refit` needs of the cache before its compaction, once all passes were read."""
        if longest := int(on_host(cache.layers.length).max(initial=0)):
            wanted = _targets(cache, self.q, entries=bucket(longest))
            self.before = jnp.copy(cache.layers.length), wanted


def sampled(step: Step, index: Int[Array, "b r"]) -> Float[Array, "b n r h"]:
    """Return one layer's queries of the tokens at these indices."""

    def local(q, index):
        return jnp.take_along_axis(q, jnp.maximum(index, 0)[:, None, :, None], 2)

    return jax.shard_map(local, out_specs=P(BATCH, HEADS))(step.q, index)


def refit(cache: Cache, references: References) -> Cache:
    """Return the cache (donated) after its compaction, in which the entries that it left have new values and biases.
    Head caches that lost no entry stay as they are."""
    longest = int(on_host(cache.layers.length).max(initial=0))
    if longest == 0 or references.before is None:
        return cache
    return _refitted(cache, references.q, references.real, *references.before, entries=bucket(longest))


@functools.partial(jax.jit, static_argnames="entries")
def _targets(cache: Cache, q: Float[Array, "l b n r h"], *, entries: int) -> Target:
    """Return the attention of the references to all entries of each head cache `[l b k …]`, of which no head cache has
    more than `entries`."""

    def local(pages, layers, q):
        def one(_, xs):
            layer, q = xs
            return None, _by_head_cache(lambda stored, q: target(q, *stored), pages, layer, entries, q)

        return lax.scan(one, None, (layers, by_kv_head(q, layers)))[1]

    return jax.shard_map(local, out_specs=SPLIT)(cache.pages, cache.layers, q)


@functools.partial(jax.jit, donate_argnums=0, static_argnames="entries")
def _refitted(
    cache: Cache,
    q: Float[Array, "l b n r h"],
    real: Bool[Array, "b r"],
    before: Int[Array, "l b k"],
    wanted: Target,
    *,
    entries: int,
) -> Cache:
    """Return the cache with the entries of those head caches refitted that have fewer than `before`."""

    def local(pages, layers, q, real, before, wanted):
        def changed(stored, q, real, wanted):
            return fit(q, jnp.tile(real, len(q) // len(real)), wanted, *stored)

        def one(pages, xs):
            layer, q, before, wanted = xs
            own = jnp.broadcast_to(real[:, None], (*layer.length.shape, real.shape[1]))
            v, bias = _by_head_cache(changed, pages, layer, entries, q, own, wanted)
            page, offset = _places(pages, layer, entries)
            fitted = (jnp.arange(entries) < layer.length[..., None]) & (layer.length < before)[..., None]
            page = jnp.where(fitted, page, pages.pool.shape[0])
            pages = pages.with_values(page, offset, v, layer.key_scale)
            metadata = pages.metadata | {BIAS: pages.metadata[BIAS].at[page, offset].set(bias, mode="drop")}
            finite = jnp.isfinite(v).all(-1) & jnp.isfinite(bias)
            return dataclasses.replace(pages, metadata=metadata), finite | ~fitted

        pages, finite = lax.scan(one, pages, (layers, by_kv_head(q, layers), before, wanted))
        return if_finite(pages, finite)

    specs = jax.tree.map(lambda leaf: jax.typeof(leaf).sharding.spec, cache.pages)
    arguments = cache.pages, cache.layers, q, real, before, wanted
    return dataclasses.replace(cache, pages=jax.shard_map(local, out_specs=specs)(*arguments))


def by_kv_head(q: Float[Array, "l b n r h"], layers: LayerCache) -> Float[Array, "l b k m h"]:
    """Return queries by kv head, those of the query heads of a group after each other."""
    return rearrange(q, "l b (k g) r h -> l b k (g r) h", k=layers.length.shape[2])


def _places(pages: Pages, layer: LayerCache, entries: int) -> tuple[Int[Array, "b k s"], Int[Array, "b k s"]]:
    """Return page and offset of the first `entries` places of each head cache. All is stored, so there is no local
    window."""
    place = jnp.broadcast_to(jnp.arange(entries), (*layer.length.shape, entries))
    return addresses(layer, place, pages.pool.shape[1], 0)


def _by_head_cache(call: Callable[..., Any], pages: Pages, layer: LayerCache, entries: int, *xs: Any) -> Any:
    """Return what `call(stored, *xs)` gives for each head cache of a layer, one after another, `[b k …]`. `stored` are
    its keys, its values and which of them exist, and `xs` its part of arrays `[b k …]`."""

    def one(row):
        length, page, offset, key_scale, *own = row
        key_scale = None if key_scale is None else key_scale[None, None]
        k, v = jnp.split(pages.entries(page[None, None], offset[None, None], key_scale)[0, 0], 2, -1)
        return call((k, v, jnp.arange(entries) < length), *own)

    shape = layer.length.shape
    rows = layer.length, *_places(pages, layer, entries), layer.key_scale, *xs
    found = lax.map(one, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows))
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), found)
