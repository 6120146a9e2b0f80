"""Attention over the cache, and in training: the kernels inside `shard_map`.

All arrays are split over batch and kv heads only, so the code is local to a shard and needs no collective. There is one
exception: in a call of many tokens each replica of a kv head computes its share of the query heads, and replicas
exchange the outputs.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache as caches
from kvjax.mesh import BATCH, HEADS, P, gather, specs_of
from kvjax.models.layers import attention_on_replicas, by_replica
from kvjax.policies.base import BIAS, Keep, Numbers, Trainable
from kvjax.policies.compiled import States, View
from kvjax.policies.views import Readout, Step, scaled_queries
from pallas_kernels.int8_entries import quantised_entries
from pallas_kernels.ordering import after
from pallas_kernels.paged_decode import paged_decode, paged_decode_append
from pallas_kernels.softmax import merge, with_sink
from pallas_kernels.vertical_slash import vertical_slash

SPLIT = P(BATCH, HEADS)


def masked_attention(
    method: Trainable,
    step: Step,
    document: Int[Array, "b t"] | None = None,
    *,
    window: int,
) -> tuple[Float[Array, "b n t h"], dict[str, Float[Array, "b k"]]]:
    """Return one layer's attention in training, which is the weighted sum over the method's masks, and the method's
    figures of each sequence and kv head. `document`: as in `Decoder.hidden`."""

    def local(method, step, document):
        state, masks = method.masks(step)
        outputs = []
        for mask in masks:
            result = attention_on_replicas(
                *(step.q, step.k, step.v, mask.end),
                window=window,
                log_gate=mask.log_gate,
                segment_ids=document,
            )
            outputs.append(with_sink(*result, step.sink))
        group = step.q.shape[1] // step.k.shape[1]
        weighted = [
            o if mask.weight is None else o * jnp.repeat(mask.weight, group)[:, None, None]
            for mask, (o, _) in zip(masks, outputs, strict=True)
        ]
        figures = method.figures(state, step, outputs)
        for name, figure in figures.items():
            if figure.shape != step.k.shape[:2]:
                raise ValueError(
                    f"{type(method).__name__}.figures: {name} is {figure.shape}, expected one number for each sequence "
                    f"and kv head, {step.k.shape[:2]}"
                )
        # weights are float32, so the product is too
        return sum(weighted[1:], weighted[0]).astype(step.q.dtype), figures

    return jax.shard_map(local, out_specs=(SPLIT, SPLIT))(gather(method, "data", "fsdp"), step, document)


def cached_attention(
    view: View,
    step: Step,
    pages: caches.Pages,
    layer: caches.LayerCache,
    *,
    seen: Int[Array, " b"],
    counted: Int[Array, " b"],
    valid: Int[Array, " b"],
    write: bool = True,
) -> tuple[Float[Array, "b n t h"], Float[Array, "b n t"], caches.Pages, caches.LayerCache]:
    """Attend from one layer's new tokens to the cache and to each other. Returns outputs, log-sum-exp, and the cache
    after the tokens were written. Without `write` only the methods' memories change.

    A token sees exactly {j : i − j < window} ∪ {j retained}. In a call of one token, only the pages of retained entries
    that the policy's selection chooses are read. The first `valid` of a sequence's `t` tokens are real; the others are
    padding, whose output is meaningless and which changes nothing. Before a single token is written, pages must be
    reserved for it (`kvjax.cache.reserve`). `counted`: `Cache.counted`.
    """
    window = view.window

    def local(view, step, pages, layer, seen, counted, valid):
        if (distance := view.admission.revisits) is not None:
            step = _with_earlier_tokens(step, pages, layer, counted, distance, window)
        admission_state, priority, delay = view.admission.score(layer.state.admission, step, seen, valid)
        eviction_state = layer.state.eviction
        if view.observer is not None:
            eviction_state = view.observer.observe(eviction_state, step, seen, valid)
        states = States(admission_state, eviction_state)
        layer = dataclasses.replace(layer, state=states)
        if (tokens := step.q.shape[2]) == 1:
            layer, priority = caches.slot_priority(layer, counted, priority, valid, delay)
        else:
            priority = caches.ring_priority(layer, counted, priority, valid, delay)
        # a priority that is NaN is a fault of the method, and marks the cache
        leaving = caches.leaving(counted, valid, tokens, window)[:, None]
        pages = caches.if_finite(pages, ~(leaving & jnp.isnan(priority[..., :tokens])))
        # ask the cache, not the policy: the method that wrote the bias may be gone
        bias = view.bias(states, step) if BIAS in pages.metadata else None
        arguments = view, step, pages, layer, priority, bias, counted, valid
        attended = _decode(*arguments, seen, write) if tokens == 1 else _prefill(*arguments)
        o, lse = with_sink(attended.o, attended.lse, step.sink)
        if not write:
            return o, lse, pages, layer
        table = layer.page_table[..., caches.ring_pages(window, pages.pool.shape[1]) :]
        scale = pages.metadata.get(caches.SCALE)
        readout = Readout(
            lse, valid, pages.pool, table, layer.length, attended.chosen, scale, layer.key_scale, pages.dtype
        )
        # metadata that no method writes as tokens come are 0: a page may hold those of an earlier sequence
        unwritten = {name: jnp.zeros(step.k.shape[:3], x.dtype) for name, x in layer.numbers.items()}
        numbers = unwritten | view.numbers(states, step, readout) | ({} if bias is None else {BIAS: bias})
        if caches.POSITION in pages.metadata:
            numbers |= {caches.POSITION: jnp.broadcast_to(step.position[:, None], step.k.shape[:3])}
        pages, layer = attended.push(numbers)
        # the new pool: a reference to the old one would make XLA keep both
        readout = dataclasses.replace(readout, pool=pages.pool, scale=pages.metadata.get(caches.SCALE))
        metadata = view.update(states, pages.metadata, step, readout)
        return o, lse, dataclasses.replace(pages, metadata=metadata), layer

    specs = specs_of((pages, layer))
    gathered_view = gather(view, "data", "fsdp")
    return jax.shard_map(local, out_specs=(SPLIT, SPLIT, *specs))(
        gathered_view, step, pages, layer, seen, counted, valid
    )


def _with_earlier_tokens(step: Step, pages, layer, counted, distance: int, window: int) -> Step:
    """Return the call's tokens with the tokens `distance` before them, the first of which are in the local window."""
    count = min(step.k.shape[2], distance)
    earlier, exists = caches.ring_entries(pages, layer, counted, count, window, first=window - 1 - distance)
    earlier = jnp.where(exists[:, None, :, None], earlier, 0).astype(step.k.dtype)
    return step.revisiting(*jnp.split(earlier, 2, -1))


class Attended(NamedTuple):
    """The result of attention for a call's tokens, and the function that writes the tokens."""

    o: Float[Array, "b n t h"]
    """The output."""
    lse: Float[Array, "b n t"]
    """The log-sum-exp."""
    push: Callable[[Numbers], tuple[caches.Pages, caches.LayerCache]]
    """Function that returns the cache after the tokens were written, given their entry metadata."""
    chosen: Bool[Array, "b k c"] | None = None
    """The pages of retained entries that were read; None: all."""


def _decode(
    view: View,
    step: Step,
    pages: caches.Pages,
    layer: caches.LayerCache,
    oldest: Float[Array, "b k 1"],
    bias: Float[Array, "b k t"] | None,
    counted: Int[Array, " b"],
    valid: Int[Array, " b"],
    seen: Int[Array, " b"],
    write: bool,
) -> Attended:
    """Attend from one token to the local window and to the pages of retained entries that the selection chooses."""
    window, page_size = view.window, pages.pool.shape[1]
    ring, chosen = caches.ring_pages(window, page_size), None
    if view.selection is not None:
        assert pages.bounds is not None
        bounds = pages.bounds.at[layer.page_table[..., ring:]].get(mode="clip")
        chosen = view.selection.select(
            step.q, bounds, layer.length, layer=step.layer,
            local=jnp.minimum(counted + 1, window), seen=seen + 1, page_size=page_size,
        )  # fmt: skip
    (q, k), scale = _scaled_for_int8(step, layer), pages.metadata.get(caches.SCALE)
    stored = q, pages.pool, layer.page_table, layer.length, jnp.minimum(counted, window - 1)
    options: dict[str, Any] = {
        "ring_pages": ring, "new": (k, step.v), "pages": chosen,
        "bias": None if bias is None else pages.metadata[BIAS], "scale": scale,
    }  # fmt: skip
    if not write:
        return Attended(*paged_decode(*stored, **options), lambda numbers: (pages, layer), chosen)
    turnover = _turnover_of_one(view.admission.keep(), pages, layer, oldest, counted, valid, window)
    at = caches.place_one(pages, layer, turnover, counted, valid, window)
    o, lse, pool = paged_decode_append(*stored, append=at.append, **options)
    if bias is not None or scale is not None:  # this metadata is read before it is written
        at = at._replace(place=after(at.place, lse))

    def push(numbers: Numbers) -> tuple[caches.Pages, caches.LayerCache]:
        current = dataclasses.replace(pages, pool=pool)
        if scale is not None:
            kv = jnp.concatenate([k, step.v], -1)
            numbers = numbers | {caches.SCALE: after(quantised_entries(kv)[1], lse)}
        return caches.push_one(current, layer, at, oldest, numbers, counted, valid, window)

    return Attended(o, lse, push, chosen)


def _scaled_for_int8(
    step: Step, layer: caches.LayerCache
) -> tuple[Float[Array, "b n t h"], Float[Array, "b k t h"]]:
    """Return queries and new keys, scaled to match the stored keys if these are int8 numbers."""
    q, k = scaled_queries(step.q, layer.key_scale), step.k
    return q, k if layer.key_scale is None else (k / layer.key_scale[:, :, None]).astype(k.dtype)


def _turnover_of_one(keep: Keep, pages, layer, oldest, counted, valid, window) -> caches.Turnover:
    """Return the turnover of one new token: whether the token that leaves the window is retained, and which entry it
    replaces."""
    wanted = keep.wanted(oldest)
    if keep.max_entries is None:
        return caches.Turnover(wanted)
    stored = caches.stored_entries(pages, layer, caches.ring_pages(window, pages.pool.shape[1]))
    wanted &= caches.leaving(counted, valid, 1, window)[:, None]
    return caches.swap_worst(stored, layer.length, keep.max_entries, wanted[..., 0], oldest[..., 0])


def _prefill(
    view: View,
    step: Step,
    pages: caches.Pages,
    layer: caches.LayerCache,
    priority: Float[Array, "b k rt"],
    bias: Float[Array, "b k t"] | None,
    counted: Int[Array, " b"],
    valid: Int[Array, " b"],
) -> Attended:
    """Attend from many tokens to the local window and the new tokens, under the admission's mask, and to all retained
    entries."""
    keep, stored_bias = view.admission.keep(), None
    if bias is not None:
        stored_bias = pages.metadata[BIAS]
        bias = jnp.concatenate([caches.in_order(layer.numbers[BIAS], counted), bias], -1)
    if keep.max_entries is not None:
        return _prefill_with_limit(view, step, pages, layer, priority, bias, counted, valid)
    wanted = keep.wanted(priority)
    turnover = caches.Turnover(wanted[..., : step.q.shape[2]])
    table = layer.page_table[..., caches.ring_pages(view.window, pages.pool.shape[1]) :]
    is_empty = table.shape[-1] == 0  # nothing can have left the window
    # parts that are merged are rounded only once, after the merge
    dtype = None if is_empty else jnp.float32
    # if everything is retained nothing is masked, since padding comes after every real token
    k, v, end, window = step.k, step.v, None, 1
    if not view.stores_all:
        k, v, exists = _window_and_new(step, pages, layer, counted, valid, view.window)
        end, window = caches.ends(wanted, priority, None, window=view.window, exists=exists), view.window

    def attend(q, scaled):
        recent = vertical_slash(q, k, v, end, window=window, log_gate=bias, dtype=dtype)
        if is_empty:
            return recent
        scale = pages.metadata.get(caches.SCALE)
        stored = paged_decode(
            scaled, pages.pool, table, layer.length, bias=stored_bias, scale=scale, dtype=dtype
        )
        return merge(*recent, *stored)

    o, lse = by_replica(attend, step.q, _scaled_for_int8(step, layer)[0], heads=k.shape[1])
    return _attended(
        o.astype(step.q.dtype), lse, step, pages, layer, priority, turnover, counted, valid, view.window
    )


def _attended(o, lse, step, pages, layer, priority, turnover, counted, valid, window) -> Attended:
    """Return the result of attention for many tokens. The pool is written only after it was read; otherwise XLA would
    copy it in every layer."""

    def push(numbers: Numbers) -> tuple[caches.Pages, caches.LayerCache]:
        kv = jnp.concatenate([step.k, step.v], -1)
        return caches.push(pages, layer, kv, priority, turnover, numbers, after(counted, o), valid, window)

    return Attended(o, lse, push)


def _prefill_with_limit(view, step, pages, layer, priority, bias, counted, valid) -> Attended:
    """Attend from many tokens under `max_entries`, where a stored entry may be replaced between one query and the next.
    The stored entries, the window's tokens and the new tokens are the keys of one call. No query sees a key after
    better ones have taken its place."""
    keep, window, tokens = view.admission.keep(), view.window, step.q.shape[2]
    ring = caches.ring_pages(window, pages.pool.shape[1])
    stored = caches.stored_entries(pages, layer, ring)
    stored_count = stored.exists.shape[-1]
    entries = pages.rows(layer.page_table[..., ring:], layer.key_scale)
    stored_k, stored_v = jnp.split(entries.astype(step.k.dtype), 2, -1)
    k, v, exists = _window_and_new(step, pages, layer, counted, valid, window)
    # stored entries stay until better ones come, whatever the threshold is now
    wanted = jnp.concatenate([stored.exists, keep.wanted(priority)], -1)
    priorities = jnp.concatenate([stored.priority, priority], -1)
    exists = jnp.concatenate([stored.exists, jnp.broadcast_to(exists, (*k.shape[:2], k.shape[2]))], -1)
    new = jnp.broadcast_to(step.position[:, None], step.k.shape[:3])
    position = [stored.position, caches.in_order(layer.numbers[caches.POSITION], counted), new]
    position = jnp.concatenate(position, -1)
    # append a dummy query, so that the mask also tells what survives the call
    wanted, priorities, exists, position = (
        jnp.pad(x, ((0, 0), (0, 0), (0, 1))) for x in (wanted, priorities, exists, position)
    )
    end = caches.ends(
        wanted, priorities, jnp.maximum(keep.max_entries, layer.length),
        window=window, exists=exists, position=position, queries=tokens + 1,
    )  # fmt: skip
    if bias is not None:
        of_stored = pages.metadata[BIAS].at[layer.page_table[..., ring:]].get(mode="clip")
        bias = jnp.concatenate([of_stored.reshape(stored.exists.shape), bias], -1)
    following = (stored_count + window - 1 + valid)[:, None, None]
    stays = end > following
    turnover = caches.Turnover(
        stays[..., stored_count : stored_count + tokens], stored.exists & ~stays[..., :stored_count]
    )
    o, lse = attention_on_replicas(
        step.q,
        jnp.concatenate([stored_k, k], 2),
        jnp.concatenate([stored_v, v], 2),
        end[..., :-1],
        window=window,
        log_gate=bias,
    )
    return _attended(o, lse, step, pages, layer, priority, turnover, counted, valid, window)


def _window_and_new(step, pages, layer, counted, valid, window):
    """Return keys and values of the window's tokens and the new ones, and a mask of those that exist."""
    ring, exists = caches.ring_entries(pages, layer, counted, window - 1, window)
    ring_k, ring_v = jnp.split(ring.astype(step.k.dtype), 2, -1)
    real = jnp.concatenate([exists, jnp.arange(step.q.shape[2]) < valid[:, None]], -1)[:, None]
    return jnp.concatenate([ring_k, step.k], 2), jnp.concatenate([ring_v, step.v], 2), real
