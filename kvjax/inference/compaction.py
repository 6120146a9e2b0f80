"""One compaction of a cache: a policy's eviction scores the stored entries layer by layer, then what stays moves up."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from kvjax.cache import Cache, LayerCache, Pages, Quota, compaction, free_counts, if_finite, ring_pages
from kvjax.cache.planes import appended
from kvjax.cache.trail import by_layer
from kvjax.inference.forward import bucket
from kvjax.mesh import HEADS, P, gather
from kvjax.models.decoder import Decoder
from kvjax.policies.compiled import CompiledPolicy
from kvjax.policies.interfaces import Eviction, Trail
from kvjax.policies.views import Stored


def compacted(
    model: Decoder,
    eviction: Eviction,
    cache: Cache,
    quota: Quota,
    *,
    entries: int,
    over: str,
    ties: str,
    causal: bool,
) -> Cache:
    """The cache after one compaction, marked if a score is NaN (`kvjax.cache.checks`). No row may hold more than
    `entries` entries in its global region. over, ties: as of `kvjax.topk.top`; causal: as of `Stored`."""
    ring = ring_pages(cache.window, cache.page_size)
    heads = jax.sharding.reshard(jnp.arange(model.config.num_kv_heads, dtype=jnp.int32), P(HEADS))

    rotation = model.config.rotation()

    def local(eviction, output, pages, layers, trail, seen, head, quota):
        trail = jax.tree.map(lambda ring: by_layer(ring, seen, pages.dtype), trail)
        pages = with_late_numbers(eviction, pages, layers, trail, seen, ring)
        found = scores(
            eviction, output, pages, layers, trail, seen, head, quota, rotation, entries, cache.window, causal
        )
        chosen = compaction.choose(found, layers.length, quota, over, ties)
        known = compaction.known(found, layers.length, quota)
        pages, layers = compaction.moved(pages, layers, chosen, ring)
        return if_finite(pages, known), layers

    specs = jax.tree.map(lambda leaf: jax.typeof(leaf).sharding.spec, (cache.pages, cache.layers))
    whole = gather(eviction, "data", "fsdp")
    output = jax.sharding.reshard(model.layers.o[...], P(None, HEADS, None, None))
    arguments = whole, output, cache.pages, cache.layers, cache.trail, cache.seen, heads, quota
    pages, layers = jax.shard_map(local, out_specs=specs)(*arguments)
    seen = cache.seen - jnp.where(quota.due, quota.dropped, 0)
    return dataclasses.replace(cache, pages=pages, layers=layers, seen=seen)


compact = jax.jit(compacted, donate_argnums=2, static_argnames=("entries", "over", "ties", "causal"))
"""The same as a program, which takes the cache's memory over."""


def with_late_numbers(
    eviction: Eviction, pages: Pages, layers: LayerCache, trail: Trail, seen: Int[Array, " b"], ring: int
) -> Pages:
    """The pages with the numbers of the newest entries that the method knows now. On one shard."""
    if not eviction.pending:
        return pages

    def one(planes, xs):
        method, layer, trail = xs
        late, count = method.late(trail), jnp.minimum(seen, method.pending)[:, None]
        # in order from the first of those that there are
        first = (method.pending - count)[..., None] + jnp.arange(method.pending)
        first = jnp.minimum(first, method.pending - 1)
        count = jnp.broadcast_to(count, layer.length.shape)
        written = {
            name: appended(
                planes[name],
                layer.page_table[..., ring:],
                layer.length - count,
                jnp.take_along_axis(x.astype(planes[name].dtype), first, 2),
                count,
            )
            for name, x in late.items()
        }
        return planes | written, None

    planes, _ = lax.scan(one, pages.planes, (eviction, layers, trail))
    return dataclasses.replace(pages, planes=planes)


def scores(
    eviction: Eviction,
    output: Float[Array, "l n h d"],
    pages: Pages,
    layers: LayerCache,
    trail: Trail,
    seen: Int[Array, " b"],
    head: Int[Array, " k"],
    quota: Quota,
    rotation: tuple[Float[np.ndarray, " pairs"], float],
    entries: int,
    window: int,
    causal: bool,
) -> Float[Array, "l b k s"]:
    """The method's scores of the last `entries` entries of each row, aligned with the right end. On one shard.

    `trail`: by layer, oldest token first. `rotation`: RoPE's, as of `ModelConfig.rotation`. `causal`: as of `Stored`.
    """
    ring = ring_pages(window, pages.pool.shape[1])
    frequencies, rope_scale = rotation

    def one(index, xs):
        method, layer, remembered, weight, count, since = xs
        place = compaction.places(layer.length, entries)
        at = compaction.addresses(layer, place, pages.pool.shape[1], ring)
        k, v = jnp.split(pages.entries(*at), 2, -1)
        planes = {name: x[at] for name, x in pages.planes.items()}
        eligible = compaction.eligible_entries(layer.length, since, entries, quota)
        forced = compaction.forced_entries(layer.length, eligible, quota)
        stored = Stored(
            k=k, v=v, place=place, scored=(place >= 0) & (place >= since[..., None]), eligible=eligible,
            forced=forced, count=count, seen=seen, output=weight, frequencies=frequencies, rope_scale=rope_scale,
            layer=index, head=head, causal=causal, planes=planes, trail=remembered,
        )  # fmt: skip
        return index + 1, method.score(layer.state.eviction, stored)

    return lax.scan(one, jnp.int32(0), (eviction, layers, trail, output, quota.count, quota.since))[1]


def compact_to(model: Decoder, policy: CompiledPolicy, cache: Cache, quota: Quota) -> Cache:
    """The cache (donated) after a compaction by a quota, compiled for its longest row, and for as many entries as are
    observed at least."""
    schedule, eviction = policy.host.schedule, policy.compact
    assert schedule is not None
    assert eviction is not None
    # entries are only moved in pages that no fork shares
    assert cache.pages.others is None or policy.host.rewritten is None
    free_counts(cache)  # nothing is chosen by what is not finite
    longest = int(np.asarray(cache.layers.length).max())
    if longest == 0:
        return cache
    entries = bucket(max(longest, schedule.needs.observed))
    how = {"over": schedule.shares.over, "ties": schedule.ties, "causal": policy.read.stores_all}
    return compact(model, eviction, cache, quota, entries=entries, **how)
