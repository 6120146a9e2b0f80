"""Tokens through all layers of a model, over its cache: what prefill and decoding have in common."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax import cache as caches
from kvjax.cache import MAX_ENTRIES_METADATA, Cache, LayerCache, Pages
from kvjax.cache.observations import newest, written
from kvjax.cache.rollback import marked, rolled_back
from kvjax.inference.allocation import free_pages, grow, may_grow, more_pages, pool_pages
from kvjax.inference.attention import cached_attention
from kvjax.inference.footprint_log import log_call
from kvjax.inference.sliding import sliding, with_windows
from kvjax.mesh import BATCH, HEADS, P, batch_shards, gather, on_host, put, specs_of
from kvjax.models.decoder import Attend, Decoder, scan_layers
from kvjax.policies.base import BIAS, Observations
from kvjax.policies.compiled import States, View
from kvjax.policies.policy import Policy
from kvjax.policies.views import Step

CAPTURED = "hidden", "q", "k", "v", "q_pre", "k_pre", "lse"
"""Arrays of a layer to capture: fields of `Step`, and each query's log-sum-exp over all that it saw [b n t]."""
MEMORIES = "state", "observations"
"""Further arrays to capture: the methods' memories after the tokens (`States`), and `Cache.observations`."""


def forward(
    model: Decoder,
    view: View,
    cache: Cache,
    tokens: Int[Array, "b t"],
    valid: Int[Array, " b"],
    *,
    write: bool = True,
    capture: Sequence[str] = (),
) -> tuple[Cache, Float[Array, "b t d"], dict[str, Any]]:
    """Run the first `valid` tokens of each sequence over the cache. To be jitted, the cache donated if it is written.

    Args:
        write: False if the tokens only read the cache and each other, as if they were written.
        capture: names from `CAPTURED` and `MEMORIES`. `kvjax.inference.capture` streams large arrays layer by layer.

    Returns:
        the cache, marked if hidden states are not finite (`kvjax.cache.checks`), the hidden states after the final
        norm, and the captured arrays, with a leading layer axis except for the observations. The values of padding are
        meaningless.
    """
    if view.window != cache.window:
        raise ValueError(f"the policy's window is {view.window}, the cache's {cache.window}")
    tokens, valid = jax.sharding.reshard((tokens, valid), (P(BATCH, None), P(BATCH)))
    position = positions(cache.seen, valid, tokens.shape[1])
    reserved = None
    if write and tokens.shape[1] == 1:
        cache, reserved = reserve(cache, valid)
    x, pages, (layers, captured, new), entries = scan_layers(
        model,
        model.embed_tokens(tokens, frozen=True),
        position,
        attending(cache, valid, write, capture),
        carry=cache.pages if write else None,
        xs=(cache.layers, view),
        slide=sliding(cache, valid),
        token=tokens,
        frozen=True,
    )
    observations = _with_records(cache, new, valid)
    captured |= {"observations": observations} if "observations" in capture else {}
    if write:
        seen = cache.seen + valid
        layers = dataclasses.replace(layers, key_scale=cache.layers.key_scale)
        if reserved is not None:
            pages, layers = release_unused(cache, pages, layers, reserved)
        windows, dropped = with_windows(cache, entries, valid)
        cache = dataclasses.replace(
            cache,
            pages=pages,
            layers=layers,
            seen=seen,
            observations=observations,
            sliding=windows,
            dropped_slots=dropped,
        )
    hidden = model.norm(x)
    return caches.check_finite(cache, hidden, position >= 0), hidden, captured


def reserve(cache: Cache, valid: Int[Array, " b"]) -> tuple[Cache, caches.Reserved]:
    """Return the cache with pages for one token of each sequence in the tables of all layers, and these pages."""

    def local(pages, layers, counted, valid):
        return caches.reserve(pages, layers, counted, valid, cache.window)

    specs = specs_of(cache.layers), P(None, None, BATCH, HEADS)
    arguments = cache.pages, cache.layers, cache.counted, valid
    layers, reserved = jax.shard_map(local, out_specs=specs)(*arguments)
    return dataclasses.replace(cache, layers=layers), reserved


def release_unused(
    cache: Cache, pages: Pages, layers: LayerCache, reserved: caches.Reserved
) -> tuple[Pages, LayerCache]:
    """Return pages and layers after a call. Reserved pages that were not used are free again."""
    layers = dataclasses.replace(layers, page_table=cache.layers.page_table)
    call = jax.shard_map(caches.release_unused, out_specs=specs_of((pages, layers)))
    return call(pages, layers, reserved, cache.layers.length)


def positions(seen: Int[Array, " b"], valid: Int[Array, " b"], tokens: int) -> Int[Array, "b t"]:
    """Return the positions of a call's tokens, −1 for padding."""
    index = jnp.arange(tokens)
    return jnp.where(index < valid[:, None], seen[:, None] + index, -1)


def attending(cache: Cache, valid: Int[Array, " b"], write: bool, capture: Sequence[str]) -> Attend:
    """Return the attention over the cache that `scan_layers` calls. Its carry is the pages, if they are written. Its x
    is a layer's cache and view; its y is the layer's cache (if it is written), the captured arrays and the layer's
    records for the observation buffer."""

    def attend(step, pages, xs):
        (layer, view), step = xs, step.without_padding()
        counts = {"seen": cache.seen, "counted": cache.counted, "valid": valid}
        pages = pages if write else cache.pages
        o, lse, pages, layer = cached_attention(view, step, pages, layer, **counts, write=write)
        layer_results = {"lse": lse, "state": layer.state}
        names = [name for name in capture if name != "observations"]
        captured = {
            name: layer_results[name] if name in layer_results else getattr(step, name) for name in names
        }
        new = _records(view, step, cache.observations, valid)
        # leave out what was not written, or it would be stacked over the layers
        layer = dataclasses.replace(layer, key_scale=None)
        if step.q.shape[2] == 1:
            layer = dataclasses.replace(layer, page_table=None)
        return o, pages if write else None, (layer if write else None, captured, new)

    return attend


def _records(view: View, step: Step, observations: Observations, valid: Int[Array, " b"]) -> Observations:
    """Return the records of one layer's tokens for the observation buffer `observations`. Raises ValueError if they are
    another pytree than the buffer."""
    if view.observer is None:
        return ()

    def local(observer, step, valid):
        records = observer.record(step)
        if jax.tree.structure(records) != jax.tree.structure(observations):
            raise ValueError(
                f"{type(observer).__name__}: its records are another pytree than its observation buffer"
            )
        return jax.tree.map(lambda x, slots: newest(x, slots, valid).astype(step.k.dtype), records, slots)

    slots = jax.tree.map(lambda buffer: buffer.shape[1], observations)
    specs = jax.tree.map(lambda buffer: P(BATCH, HEADS) if buffer.ndim == 5 else P(BATCH), observations)
    return jax.shard_map(local, out_specs=specs)(gather(view.observer, "data", "fsdp"), step, valid)


def _with_records(cache: Cache, new: Observations, valid: Int[Array, " b"]) -> Observations:
    """Return the cache's observation buffer after the `_records` of a call, with a leading layer axis, were written."""
    if not jax.tree.leaves(new):
        return cache.observations

    def local(observations, new, seen, valid):
        return jax.tree.map(lambda buffer, x: written(buffer, x, seen, valid), observations, new)

    specs = specs_of(cache.observations)
    return jax.shard_map(local, out_specs=specs)(cache.observations, new, cache.seen, valid)


@functools.partial(jax.jit, donate_argnums=2)
def last_logits(
    model: Decoder,
    view: View,
    cache: Cache,
    tokens: Int[Array, "b t"],
    valid: Int[Array, " b"],
) -> tuple[Cache, Float[Array, "b v"]]:
    """Run `forward`, and return the cache and the logits that follow each sequence's last valid token."""
    cache, hidden, _ = forward(model, view, cache, tokens, valid)
    # a sum over one token and zeros, which is exact also if tokens are split over devices
    last = (jnp.arange(hidden.shape[1]) == jnp.maximum(valid - 1, 0)[:, None])[..., None]
    logits = model.logits(jnp.where(last, hidden, 0).sum(1, keepdims=True))
    return caches.check_finite(cache, logits, valid[:, None] > 0), logits[:, 0]


@jax.jit
def memories(
    model: Decoder, view: View, cache: Cache, tokens: Int[Array, "b t"], valid: Int[Array, " b"]
) -> tuple[States, Observations, Int[Array, " shards"]]:
    """Return the memories after the eviction observed tokens that are not written, and the free count of `forward`."""
    cache, _, captured = forward(model, view, cache, tokens, valid, write=False, capture=MEMORIES)
    states = dataclasses.replace(cache.layers.state, eviction=captured["state"].eviction)
    return states, captured["observations"], cache.pages.free_count


def drop_observation_state(cache: Cache, later: View) -> Cache:
    """Return the cache (donated) without the memories and entry metadata of methods that `later`, the view that
    continues it, does not have. They would miss the later tokens, and a policy that used them again could not tell.
    Policies that differ only in an eviction that is done then run the same program. Positions of entries stay, since
    spans may be dropped later."""
    kept = {*later.metadata, BIAS, caches.SCALE, *MAX_ENTRIES_METADATA}
    numbers, metadata = (
        {name: numbers for name, numbers in x.items() if name in kept}
        for x in (cache.layers.numbers, cache.pages.metadata)
    )
    layers, pages = cache.layers, dataclasses.replace(cache.pages, metadata=metadata)
    layers = dataclasses.replace(layers, numbers=numbers)
    if later.eviction is not None:
        return dataclasses.replace(cache, pages=pages, layers=layers)
    layers = dataclasses.replace(layers, state=dataclasses.replace(layers.state, eviction=()))
    return dataclasses.replace(cache, pages=pages, layers=layers, observations=())


SIZES = 16, 64, 256, 1024, 2048, 4096, 8192, 16384
"""Tokens that calls are compiled for. A longer prompt is read in several calls, a shorter one is padded."""
SMALL_PADDING = 32
"""Tokens of padding that cost less than another call."""


def pieces(tokens: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Split `tokens` tokens into calls of at most `chunk`: yield the tokens of each call, and the size that they are
    padded to, one of `SIZES` or the chunk. A call is padded by at most a quarter of `tokens`, or `SMALL_PADDING`."""
    sizes = [*(size for size in SIZES if size < chunk), max(chunk, SIZES[0])]
    left = tokens
    while left:
        size = next((size for size in sizes if size >= left), None)
        if size is None or size - left > max(tokens // 4, SMALL_PADDING):
            size = max(size for size in sizes if size <= left)
        count = min(size, left, chunk)
        yield count, size
        left -= count


def bucket(tokens: int) -> int:
    """Return the padded length that `tokens` tokens are compiled for if they must stay in one call: 16 · 2ⁿ or
    24 · 2ⁿ."""
    size = 16
    while size < tokens:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def padded(rows: list[np.ndarray], size: int) -> tuple[jax.Array, jax.Array]:
    """Return rows as one batch on the mesh: padded to `size` tokens, and with empty rows for all batch shards."""
    shards = batch_shards()
    batch = -(-len(rows) // shards) * shards
    tokens, valid = np.zeros((batch, size), np.int32), np.zeros(batch, np.int32)
    for index, row in enumerate(rows):
        tokens[index, : row.size], valid[index] = row, row.size
    return put(tokens, BATCH, None), put(valid, BATCH)


def feed(
    model: Decoder,
    host: Policy,
    view: View,
    cache: Cache,
    rows: Sequence[Int[np.ndarray, " _"]],
    chunk: int,
    logits: Float[Array, "b v"] | None = None,
    new_tokens: int = 0,
    grows: bool = True,
) -> tuple[Cache, Float[Array, "b v"]]:
    """Run all of `rows` through the model, at most `chunk` tokens a call.

    Args:
        host, view: of the compiled policy. The view is `read` or `extend`.
        cache: the cache, which is donated.
        logits: the logits to return for rows that are empty.
        new_tokens: tokens that will follow.
        grows: True if the pool may grow if it runs out.

    Returns:
        the cache, and the logits after each row's last token.

    Raises:
        CapacityError: the pool ran out.
    """
    longest = max(row.size for row in rows)
    for start in range(0, longest, chunk):
        end = min(start + chunk, longest)
        log_call(cache, [row[start:end] for row in rows])
        for count, size in pieces(end - start, chunk):
            part = [row[start : start + count] for row in rows]
            tokens, valid = padded(part, size)
            start += count
            cache, new = _read_call(
                model, host, view, cache, tokens, valid, longest - start + new_tokens, grows
            )
            if logits is not None and not all(row.size for row in part):
                new = jnp.where((valid > 0)[:, None], new, logits)
            logits = new
    assert logits is not None
    return cache, logits


def _read_call(
    model: Decoder,
    host: Policy,
    view: View,
    cache: Cache,
    tokens: Int[Array, "b t"],
    valid: Int[Array, " b"],
    new_tokens: int,
    grows: bool,
) -> tuple[Cache, Float[Array, "b v"]]:
    """Run `last_logits`. If the pool runs out and may grow, run it again with a larger one. The tokens that a call
    admits do not depend on the free pages, so there are enough pages the second time."""
    count = int(on_host(valid).max())
    if more_pages(host, cache, count) <= free_pages(cache):
        return last_logits(model, view, cache, tokens, valid)
    mark = marked(cache) if grows and may_grow(cache) else None
    cache, new = last_logits(model, view, cache, tokens, valid)
    if (missing := -free_pages(cache)) > 0 and mark is not None:
        need = pool_pages(cache) + missing
        cache = grow(host, rolled_back(cache, mark), need, count, new_tokens)
        cache, new = last_logits(model, view, cache, tokens, valid)
    caches.check(cache, host.name, new_tokens)
    return cache, new
