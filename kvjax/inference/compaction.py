"""Compaction of a cache. The host computes how many entries stay, by the policy's schedule. A program has the eviction
score the stored entries layer by layer, and moves the entries that stay to the front."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from kvjax.cache import Cache, LayerCache, Pages, Quota, compaction, free_counts, if_finite, ring_pages
from kvjax.cache.metadata import appended
from kvjax.cache.observations import by_layer
from kvjax.inference.forward import bucket
from kvjax.mesh import BATCH, HEADS, P, gather, on_host, put, specs_of
from kvjax.models.decoder import Decoder
from kvjax.models.layers import gathered
from kvjax.policies.base import Eviction, LateMetadata, Observations
from kvjax.policies.budget import places
from kvjax.policies.compiled import CompiledPolicy
from kvjax.policies.eviction.wrapper import innermost
from kvjax.policies.policy import Policy
from kvjax.policies.schedule import Range, Schedule
from kvjax.policies.views import Stored
from pallas_kernels.eight_bits import dequantised


def compact_to(model: Decoder, policy: CompiledPolicy, cache: Cache, quota: Quota) -> Cache:
    """Return the cache (donated) after a compaction by a quota. The program is compiled for the longest head cache, but
    at least for the number of observed entries."""
    schedule, eviction = policy.host.schedule, policy.compact
    assert schedule is not None
    assert eviction is not None
    # entries may only be moved in pages that no fork shares
    assert cache.pages.others is None or policy.host.rewrites_entries
    free_counts(cache)  # raises if a number is not finite: no entry may be chosen by it
    longest = int(on_host(cache.layers.length).max())
    if longest == 0:
        return cache
    entries = bucket(max(longest, schedule.needs.observed))
    how = {"over": schedule.shares.over, "ties": schedule.ties, "causal": policy.read.stores_all}
    return compact(model, eviction, cache, quota, entries=entries, **how)


def quota(
    host: Policy,
    cache: Cache,
    tokens: Sequence[int],
    *,
    due: Sequence[bool] | None = None,
    since: Int[Array, "l b k"] | None = None,
    dropped: Sequence[int] | None = None,
    prefix: Sequence[int] = (),
    local: Int[np.ndarray, " b"] | None = None,
) -> Quota:
    """Return the quota that the policy's schedule gives contexts, or chunks of contexts.

    Args:
        tokens: the number of tokens of each context or chunk.
        due: True for the sequences that are compacted; None: all.
        since: lengths of the head caches before the chunk; None: all entries are eligible.
        dropped: the number of further entries of each sequence whose tokens were only read to observe; None: 0.
        prefix: the number of each prompt's first tokens that always stay; (): 0.
        local: the number of tokens in each sequence's local window; None: as many of `tokens` as fit.
    """
    schedule = host.schedule
    assert schedule is not None
    layers, slots = len(cache.layers.length), cache.window - 1
    due = [True] * len(tokens) if due is None else list(due)
    dropped = [0] * len(tokens) if dropped is None else dropped
    prefix = prefix or [0] * len(tokens)
    allowed = schedule.prompt_allowance(tokens, prefix, cache.entry_bytes)
    newest = [schedule.newest(share, gone or None) for share, gone in zip(allowed, dropped, strict=True)]
    if schedule.trigger.in_chunks:
        counts = schedule.chunk_counts(tokens, allowed, newest, layers)[..., None]
    else:
        counts = schedule.counts(tokens, allowed, prefix, slots, layers, cache.layers.length.shape[2])
    in_window = np.minimum(slots, tokens) if local is None else local
    counts = np.maximum(counts - in_window[:, None], 0)
    # if the budget is below the entries that always stay, the newest of them stay
    least = counts.min((0, 2))
    last = np.minimum(_beyond(newest, slots), least)
    first = np.minimum(schedule.needs.first, least - last)
    return _on_devices(schedule, cache, due, counts, last, first, dropped, since)


def range_quota(
    host: Policy,
    cache: Cache,
    rows: Sequence[Int[np.ndarray, " _"]],
    read: int | None = None,
    before: int = 0,
) -> Quota:
    """Return the quota of the ranges that a schedule with `Needs.undecided` compacts, in prompts of these token ids.

    A range has int(ratio · entries) places, counted over all entries that compete and not over those of each head.

    Args:
        read: the most tokens that were read of each prompt so far; None: all.
        before: the most tokens that were read of each prompt before the last compaction.
    """
    schedule = host.schedule
    assert schedule is not None
    layers, _, heads = cache.layers.length.shape

    def looked_at(row: Int[np.ndarray, " _"]) -> Range:
        end = row.size if read is None else min(row.size, read)
        prefix = schedule.needs.prefix_of(row)
        return schedule.range(row.size, min(row.size, before), end, cache.entry_bytes, prefix)

    ranges = [looked_at(row) for row in rows]
    counts = np.stack([places(x.tokens * x.ratio, layers, heads, schedule.shares.over) for x in ranges], 1)
    undecided = np.array([x.undecided for x in ranges], np.int32)
    newest = np.array([x.tokens for x in ranges], np.int32) + undecided
    none = np.zeros(len(ranges), np.int32)
    empty = (0, cache.layers.length.shape[1] - len(ranges))
    since = cache.layers.length - put(np.pad(newest, empty), BATCH)[:, None]
    due = [x.tokens > 0 for x in ranges]
    quota = _on_devices(schedule, cache, due, counts, none, none, none, since)
    return dataclasses.replace(quota, undecided=put(np.pad(undecided, empty), BATCH))


def overflow_quota(host: Policy, cache: Cache, over: Int[np.ndarray, " b"]) -> Quota:
    """Return the quota of `when="overflow"`: every head loses a share of its entries, repeatedly, until the sequence
    has lost the entries that it is `over` its budget. A sequence that is not over its budget loses none."""
    schedule = host.schedule
    assert schedule is not None
    length = on_host(cache.layers.length)[:, : len(over)]
    seen, slots = on_host(cache.seen)[: len(over)], cache.window - 1
    last = _beyond(
        [schedule.newest(share) for share in schedule.allowance(seen.tolist(), cache.entry_bytes)], slots
    )
    counts = length.copy()
    while (low := (length - counts).sum((0, 2)) < over).any():
        free = np.maximum(counts - (last + schedule.needs.first)[:, None], 0)
        gone = np.floor(schedule.trigger.drop * (1 + 1e-12) * counts).astype(np.int32)
        gone = np.minimum(np.maximum(gone, 1), free) * low[:, None]
        if not gone.any():
            break
        counts -= gone
    first = np.full(len(over), schedule.needs.first)
    return _on_devices(schedule, cache, over > 0, counts, last, first, np.zeros_like(first), None)


def _beyond(newest, slots) -> Int[np.ndarray, " b"]:
    """Return the number of each sequence's newest tokens that are outside the local window."""
    return np.maximum(0, np.array(newest, np.int32) - slots)


def _on_devices(schedule: Schedule, cache: Cache, due, counts, last, first, dropped, since) -> Quota:
    layers, batch, heads = cache.layers.length.shape
    empty = (0, batch - len(due))

    def by_sequence(x):
        return put(np.pad(np.asarray(x), empty), BATCH)

    def by_row(x):
        return put(np.pad(x, ((0, 0), empty, (0, 0))), None, BATCH, HEADS if x.shape[2] == heads else None)

    zero = np.zeros((layers, len(due), heads), np.int32)
    return Quota(
        due=by_sequence(due),
        count=by_row(counts.astype(np.int32)),
        pinned=by_row(schedule.shares.pins(counts)),
        since=by_row(zero) if since is None else since,
        dropped=by_sequence(np.array(dropped, np.int32)),
        undecided=by_sequence(np.zeros(len(due), np.int32)),
        last=by_sequence(last.astype(np.int32)),
        first=by_sequence(first.astype(np.int32)),
        floor=put(np.float32(schedule.budget.floor)),
    )


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
    """Return the cache after one compaction, marked if a score is NaN (`kvjax.cache.checks`). No head cache may retain
    more than `entries` entries. over, ties: as in `kvjax.topk.top`; causal: as in `Stored`."""
    ring = ring_pages(cache.window, cache.page_size)
    heads = jax.sharding.reshard(jnp.asarray(model.config.head_at_place), P(None, HEADS))

    rotation = model.config.rotation()

    def local(eviction, output, pages, layers, observations, seen, head, quota):
        observations = jax.tree.map(lambda buffer: by_layer(buffer, seen, pages.dtype), observations)
        pages = with_late_numbers(eviction, pages, layers, observations, seen, ring)
        all_scores = scores(
            eviction,
            output,
            pages,
            layers,
            observations,
            seen,
            head,
            quota,
            rotation,
            entries,
            cache.window,
            causal,
        )
        chosen = compaction.choose(all_scores, layers.length, quota, over, ties, model.config.head_order)
        finite = compaction.scored(all_scores, layers.length, quota)
        pages, layers = compaction.moved(pages, layers, chosen, ring)
        return if_finite(pages, finite), layers

    specs = specs_of((cache.pages, cache.layers))
    gathered_eviction = gather(eviction, "data", "fsdp")
    arguments = (
        gathered_eviction,
        output_projections(model),
        cache.pages,
        cache.layers,
        cache.observations,
        cache.seen,
        heads,
        quota,
    )
    pages, layers = jax.shard_map(local, out_specs=specs)(*arguments)
    seen = cache.seen - jnp.where(quota.due, quota.dropped, 0)
    return dataclasses.replace(cache, pages=pages, layers=layers, seen=seen)


def output_projections(model: Decoder) -> dict[str, Shaped[Array, "l _ d"]]:
    """Return the output projections of the layers with full attention, split by heads only: values [l (n h) d] and, for
    8-bit weights, their scales."""
    projections = {"values": model.layers.o, "scale": model.layers.o_scale}
    projections = {name: gathered(x, HEADS) for name, x in projections.items() if x is not None}
    if model.config.sliding_layers:
        projections = jax.tree.map(lambda x: x[np.array(model.config.full_layers, np.int32)], projections)
    return projections


def by_head(projection: dict[str, Shaped[Array, "_ d"]], like: Float[Array, "..."]) -> Float[Array, "n h d"]:
    """Return one layer of `output_projections` by query head. like: entries [… h], which give head size and dtype."""
    weight = projection["values"]
    if "scale" in projection:
        weight = dequantised(**projection, dtype=like.dtype)
    return weight.reshape(-1, like.shape[-1], weight.shape[-1])


compact = jax.jit(compacted, donate_argnums=2, static_argnames=("entries", "over", "ties", "causal"))
"""`compacted` as a program to which the cache is donated."""


def with_late_numbers(
    eviction: Eviction,
    pages: Pages,
    layers: LayerCache,
    observations: Observations,
    seen: Int[Array, " b"],
    ring: int,
) -> Pages:
    """Return one shard's pages after the metadata of the newest entries, which the method knows only now, was
    written."""
    late = innermost(eviction)
    if not isinstance(late, LateMetadata) or not late.pending:
        return pages

    def one(metadata, xs):
        method, layer, observations = xs
        numbers, count = method.late(observations), jnp.minimum(seen, method.pending)[:, None]
        # in order, from the first one that exists
        first = (method.pending - count)[..., None] + jnp.arange(method.pending)
        first = jnp.minimum(first, method.pending - 1)
        count = jnp.broadcast_to(count, layer.length.shape)
        written = {
            name: appended(
                metadata[name],
                layer.page_table[..., ring:],
                layer.length - count,
                jnp.take_along_axis(x.astype(metadata[name].dtype), first, 2),
                count,
            )
            for name, x in numbers.items()
        }
        return metadata | written, None

    metadata, _ = lax.scan(one, pages.metadata, (late, layers, observations))
    return dataclasses.replace(pages, metadata=metadata)


def scores(
    eviction: Eviction,
    output: dict[str, Shaped[Array, "l _ d"]],
    pages: Pages,
    layers: LayerCache,
    observations: Observations,
    seen: Int[Array, " b"],
    head: Int[Array, "l k"],
    quota: Quota,
    rotation: tuple[Float[np.ndarray, "l pairs"], Float[np.ndarray, " l"]],
    entries: int,
    window: int,
    causal: bool,
) -> Float[Array, "l b k s"]:
    """Return the method's scores of the last `entries` entries of each of one shard's head caches, aligned at the right
    end.

    Args:
        output: from `output_projections`.
        observations: observation buffers by layer, the oldest token first.
        rotation: from `ModelConfig.rotation`.
        causal: as in `Stored`.
    """
    ring = ring_pages(window, pages.pool.shape[1])

    def one(index, xs):
        method, layer, remembered, weights, head, count, since, (frequencies, rope_scale) = xs
        place = compaction.places(layer.length, entries)
        at = compaction.addresses(layer, place, pages.pool.shape[1], ring)
        k, v = jnp.split(pages.entries(*at, layer.key_scale), 2, -1)
        metadata = {name: x[at] for name, x in pages.metadata.items()}
        eligible = compaction.eligible_entries(layer.length, since, entries, quota)
        forced = compaction.forced_entries(layer.length, eligible, quota)
        stored = Stored(
            k=k, v=v, place=place, scored=(place >= 0) & (place >= since[..., None]), eligible=eligible,
            forced=forced, count=count, seen=seen, output=by_head(weights, k),
            frequencies=frequencies, rope_scale=rope_scale, layer=index, head=head, causal=causal,
            metadata=metadata, observations=remembered,
        )  # fmt: skip
        return index + 1, method.score(layer.state.eviction, stored)

    xs = eviction, layers, observations, output, head, quota.count, quota.since, rotation
    return eviction.over_layers(lax.scan(one, jnp.int32(0), xs)[1])
