"""Compaction: the entries of the global region that are worth least go, and their pages are free again.

All rows of a cache are compacted at once, between two calls of the model. Layers are scored one after another; then
each head, the heads of a layer or all heads together choose what stays, and every row moves up to the front of its
pages, in order.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import Cache, LayerCache, Pages, ring_pages, with_keys
from kvjax.mesh import BATCH, P, gather, put
from kvjax.models.decoder import Decoder
from kvjax.policies.interfaces import Eviction
from kvjax.policies.policy import Policy
from kvjax.policies.top import top
from kvjax.step import Stored
from kvjax.struct import struct
from pallas_kernels.bits import as_floats


@struct
class Quota:
    """What a compaction keeps.

    due: the sequences that are compacted. count: of the eligible entries, how many stay of each kv head on average, by
    layer or for all, or of each single row. pinned: how many of its own best each head keeps anyway. since: where in
    each row the eligible entries begin; those before stay. dropped: how many of a row's newest entries go, having
    looked at the others. last, first: how many of the newest before those, and of a row's very first entries, always
    stay; they take places of `count`. floor: entries with a lower score go in any case.
    """

    due: Bool[Array, " b"]
    count: Int[Array, "l b #k"]
    pinned: Int[Array, "l b #k"]
    since: Int[Array, "l b k"]
    dropped: Int[Array, " b"]
    last: Int[Array, " b"]
    first: Int[Array, " b"]
    floor: Float[Array, ""]


def quota(
    policy: Policy,
    cache: Cache,
    tokens: Sequence[int],
    *,
    due: Sequence[bool] | None = None,
    since: Int[Array, "l b k"] | None = None,
    dropped: Sequence[int] | None = None,
) -> Quota:
    """What stays, by the policy's plan, of contexts (or of chunks of them) of so many tokens, a number a sequence.

    Args:
        due: which sequences are compacted; None: all.
        since: lengths of the rows before the chunk; None: everything is eligible.
        dropped: how many more tokens behind these were only read to look at them; None: none. They are among the newest
            that the method keeps.
    """
    plan = policy.plan
    assert plan is not None
    layers, slots = len(cache.layers.length), policy.window - 1
    due = [True] * len(tokens) if due is None else list(due)
    dropped = [0] * len(tokens) if dropped is None else dropped
    kept = plan.kept(tokens, entry_bytes(cache))
    newest = [max(0, plan.newest(share) - gone) for share, gone in zip(kept, dropped, strict=True)]
    if plan.schedule.in_chunks:
        counts = plan.chunk_counts(tokens, kept, newest, layers)
    else:
        counts = plan.counts(tokens, kept, slots, layers)
    counts = np.maximum(counts - np.minimum(slots, tokens), 0)
    # a budget below what always stays: the newest
    least = counts.min(0)
    last = np.minimum(_beyond(newest, slots), least)
    first = np.minimum(plan.first, least - last)
    return _on_devices(plan, cache, due, counts[..., None], last, first, dropped, since)


def overflow_quota(policy: Policy, cache: Cache, over: Int[np.ndarray, " b"]) -> Quota:
    """What stays where every head loses a share of its own entries, once or as often as it takes until a sequence has
    lost as many as it is `over` its budget (`when="overflow"`). Nothing for one that is not."""
    plan = policy.plan
    assert plan is not None
    length = np.asarray(cache.layers.length)[:, : len(over)]
    seen, slots = np.asarray(cache.seen)[: len(over)], policy.window - 1
    last = _beyond([plan.newest(share) for share in plan.kept(seen.tolist(), entry_bytes(cache))], slots)
    counts = length.copy()
    while (low := (length - counts).sum((0, 2)) < over).any():
        free = np.maximum(counts - (last + plan.first)[:, None], 0)
        gone = np.floor(plan.schedule.lost * (1 + 1e-12) * counts).astype(np.int32)
        gone = np.minimum(np.maximum(gone, 1), free) * low[:, None]
        if not gone.any():
            break
        counts -= gone
    first = np.full(len(over), plan.first)
    return _on_devices(plan, cache, over > 0, counts, last, first, np.zeros_like(first), None)


def _beyond(newest, slots) -> Int[np.ndarray, " b"]:
    """How many of each sequence's newest tokens are beyond the ring."""
    return np.maximum(0, np.array(newest, np.int32) - slots)


def entry_bytes(cache: Cache) -> int:
    """Bytes of one token's key and value in all layers and kv heads."""
    layers, _, heads = cache.layers.length.shape
    return layers * heads * cache.pages.pool.shape[-1] * cache.pages.pool.dtype.itemsize


def _on_devices(plan, cache, due, counts, last, first, dropped, since) -> Quota:
    layers, batch, heads = cache.layers.length.shape
    empty = (0, batch - len(due))

    def by_sequence(x):
        return put(np.pad(np.asarray(x), empty), BATCH)

    def by_row(x):
        return put(np.pad(x, ((0, 0), empty, (0, 0))), None, BATCH, "tensor" if x.shape[2] == heads else None)

    zero = np.zeros((layers, len(due), heads), np.int32)
    floor = -np.inf if plan.budget.threshold is None else plan.budget.threshold
    return Quota(
        due=by_sequence(due),
        count=by_row(counts.astype(np.int32)),
        pinned=by_row(plan.shares.pins(counts)),
        since=by_row(zero) if since is None else since,
        dropped=by_sequence(np.array(dropped, np.int32)),
        last=by_sequence(last.astype(np.int32)),
        first=by_sequence(first.astype(np.int32)),
        floor=put(np.float32(floor)),
    )


@partial(jax.jit, donate_argnums=2, static_argnames=("entries", "over"))
def compact(
    model: Decoder, eviction: Eviction, cache: Cache, quota: Quota, *, entries: int, over: str
) -> Cache:
    """The cache (donated) after one compaction. No row may hold more than `entries` entries in its global region."""
    ring = ring_pages(cache.window, cache.page_size)
    heads = jax.sharding.reshard(jnp.arange(model.config.num_kv_heads, dtype=jnp.int32), P("tensor"))

    def local(eviction, output, pages, layers, seen, head, quota):
        scores = _scores(eviction, output, pages, layers, seen, head, quota, entries, cache.window)
        kept = _kept(scores, layers.length, quota, over)
        return _moved(pages, layers, kept, ring)

    specs = jax.tree.map(lambda leaf: jax.typeof(leaf).sharding.spec, (cache.pages, cache.layers))
    whole = gather(eviction, "data", "fsdp")
    output = gather(model.layers.o[...], "fsdp")
    arguments = whole, output, cache.pages, cache.layers, cache.seen, heads, quota
    pages, layers = jax.shard_map(local, out_specs=specs)(*arguments)
    seen = cache.seen - jnp.where(quota.due, quota.dropped, 0)
    return dataclasses.replace(cache, pages=pages, layers=layers, seen=seen)


def places(length: Int[Array, "*r"], entries: int) -> Int[Array, "*r s"]:
    """The places in their row of the last `entries` entries of each; negative where a row has fewer."""
    return length[..., None] - entries + jnp.arange(entries)


def _at(layer: LayerCache, place: Int[Array, "b k s"], page_size: int, ring: int):
    """Page and offset of places in the global region."""
    column = jnp.clip(ring + place // page_size, 0, layer.page_table.shape[-1] - 1)
    return jnp.take_along_axis(layer.page_table, column, 2), place % page_size


def _scores(eviction, output, pages, layers, seen, head, quota, entries, window) -> Float[Array, "l b k s"]:
    ring = ring_pages(window, pages.pool.shape[1])

    def one(index, xs):
        method, layer, weight, count, since = xs
        at = _at(layer, place := places(layer.length, entries), pages.pool.shape[1], ring)
        k, v = jnp.split(pages.entries(*at), 2, -1)
        attended = None if pages.attended is None else pages.attended[at]
        eligible = (place >= 0) & (place >= since[..., None])
        stored = Stored(
            k=k, v=v, place=place, eligible=eligible, forced=_forced(layer.length, eligible, quota), count=count,
            seen=seen, output=weight, layer=index, head=head, causal=window == 1, attended=attended,
        )  # fmt: skip
        return index + 1, method.score(layer.state[1], stored)

    return lax.scan(one, jnp.int32(0), (eviction, layers, output, quota.count, quota.since))[1]


def _forced(length: Int[Array, "*l b k"], eligible: Bool[Array, "*l b k s"], quota: Quota):
    """Which of the eligible entries stay whatever their score."""
    place = places(length, eligible.shape[-1])
    age = length[..., None] - place - quota.dropped[:, None, None]
    newest = (age > 0) & (age <= quota.last[:, None, None])
    return eligible & (newest | (place < quota.first[:, None, None]))


def _kept(
    scores: Float[Array, "l b k s"], length: Int[Array, "l b k"], quota: Quota, over: str
) -> Bool[Array, "l b k s"]:
    place = places(length, scores.shape[-1])
    exists = place >= 0
    old = exists & (place < quota.since[..., None])
    eligible = exists & ~old & (length[..., None] - place > quota.dropped[:, None, None])
    forced = _forced(length, eligible, quota)
    eligible &= forced | ~(scores < quota.floor)
    scores = jnp.where(forced, jnp.inf, scores)
    scores = jnp.where(top(scores, eligible, quota.pinned, "head"), jnp.inf, scores)
    chosen = top(scores, eligible, quota.count, over)
    return jnp.where(quota.due[:, None, None], chosen | old, exists)


def _moved(
    pages: Pages, layers: LayerCache, kept: Bool[Array, "l b k s"], ring: int
) -> tuple[Pages, LayerCache]:
    entries, (capacity, page_size, _) = kept.shape[-1], pages.pool.shape

    def move(carry, xs):
        (stored, bounds), (layer, kept) = carry, xs
        place = places(layer.length, entries)
        target = jnp.cumsum(kept, -1, dtype=jnp.int32) - 1
        page, offset = _at(layer, target, page_size, ring)
        source = _at(layer, place, page_size, ring)
        moved = as_floats(stored[0][source], pages.dtype)
        bounds = with_keys(bounds, jnp.where(kept, page, capacity), moved)
        page = jnp.where(kept & (target != place), page, capacity)
        stored = jax.tree.map(lambda x: x.at[page, offset].set(x[source], mode="drop"), stored)
        return (stored, bounds), kept.sum(-1, dtype=jnp.int32)

    unbounded = jax.tree.map(lambda bounds: jnp.full_like(bounds, jnp.inf), pages.bounds)
    stored = pages.pool, pages.attended
    ((pool, attended), bounds), length = lax.scan(move, (stored, unbounded), (layers, kept))
    column = jnp.arange(layers.page_table.shape[-1]) - ring
    begin, stop = (-(-x // page_size)[..., None] for x in (length, layers.length))
    freed = (column >= begin) & (column < stop)
    at = pages.free_count[0] + jnp.cumsum(freed, dtype=jnp.int32).reshape(freed.shape) - 1
    free = pages.free.at[jnp.where(freed, at, capacity)].set(layers.page_table, mode="drop")
    table = jnp.where(freed, capacity, layers.page_table)
    count = pages.free_count + freed.sum(dtype=jnp.int32)
    pages = Pages(pool, free, count, pages.dtype, bounds, attended)
    return pages, dataclasses.replace(layers, page_table=table, length=length)
