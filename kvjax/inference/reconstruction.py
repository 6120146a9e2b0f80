"""Reconstruction passes: tokens that are read after a prompt and attend to a part of it. They only change the metadata
of its entries (`Reconstruction.passes`)."""

import dataclasses
import functools
from collections.abc import Generator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from kvjax.cache import Cache, LayerCache, Pages, check_finite
from kvjax.cache.compaction import addresses
from kvjax.cache.metadata import placed
from kvjax.inference.attention import cached_attention
from kvjax.inference.checks import check_length
from kvjax.inference.compaction import by_head, output_projections
from kvjax.inference.footprint_log import log_call
from kvjax.inference.forward import bucket, padded, positions
from kvjax.inference.refitting import References, sampled
from kvjax.inference.sliding import sliding
from kvjax.mesh import BATCH, gather, put, specs_of, use_mesh
from kvjax.models.decoder import Decoder, scan_layers
from kvjax.policies.base import Metadata, Pass, Reconstruction
from kvjax.policies.compiled import CompiledPolicy, View
from kvjax.policies.eviction.refit import refitting
from kvjax.policies.eviction.wrapper import innermost
from kvjax.policies.policy import Policy
from kvjax.policies.views import PassEntries, Step
from kvjax.struct import struct

CacheSteps = Generator[Cache, Cache, Cache]
"""Steps over a cache, which is donated to each step. A step yields the cache, and the next one is sent it, possibly
with a pool that others have changed. The last step returns it."""


def all_of(steps: CacheSteps) -> Cache:
    """Return the cache after all of these steps."""
    try:
        cache = next(steps)
        while True:
            cache = steps.send(cache)
    except StopIteration as end:
        return end.value


def reconstruct(
    model: Decoder,
    policy: CompiledPolicy,
    cache: Cache,
    rows: Sequence[Int[np.ndarray, " _"]],
    references: References | None = None,
) -> CacheSteps:
    """Return the passes that the policy's eviction, or the refit around it, makes over the cache (donated) of `rows`,
    as steps. They fill the eviction's entry metadata and change nothing else. The i-th passes of all rows run together;
    rows with fewer passes idle.

    Args:
        policy: a policy whose eviction is a `Reconstruction` or in a refit.
        cache: a cache that holds every token of `rows` in pages (`View.stores_all`), with the eviction's metadata.
        references: the object that takes the passes' queries.
    """
    method, schedule = innermost(policy.compact), policy.host.schedule
    traced = method if isinstance(method, Reconstruction) else None
    assert schedule is not None
    passes = [passes_of(policy.host, row) for row in rows]
    first = bucket(max(schedule.needs.longest_prefix, schedule.needs.first))
    behind = [max((x.tokens.size for x in passes_of_row), default=0) for passes_of_row in passes]
    most, row = max(zip(behind, rows, strict=True), key=lambda pair: pair[0] + pair[1].size)
    check_length(model, [row], most, kind="of a reconstruction pass")
    for index in range(max(map(len, passes), default=0)):
        if index:
            cache = yield cache
        with use_mesh(model):
            current = [
                passes_of_row[index] if index < len(passes_of_row) else None for passes_of_row in passes
            ]
            tokens = [np.zeros(0, np.int32) if x is None else x.tokens for x in current]
            log_call(cache, tokens)
            existing = [x for x in current if x is not None]
            fed, valid = padded(tokens, bucket(_longest(existing)))
            sample = None if references is None else (references.q, references.index(index))
            current_spans = spans(current, fed.shape[0])
            cache, q = one_pass(
                model, policy.read, traced, cache, fed, valid, current_spans, sample, first=first
            )
            if references is not None:
                references.q = q
    return cache


def passes_of(host: Policy, row: Int[np.ndarray, " _"]) -> Sequence[Pass]:
    """Return the reconstruction passes after a prompt of these token ids. A refit makes its reader's passes, other
    policies those of their eviction, if it has any."""
    refit = refitting(host.eviction)
    method = innermost(host.eviction) if refit is None else refit.reader
    return method.passes(row) if isinstance(method, Reconstruction) else ()


def _longest(passes: Sequence[Pass]) -> int:
    """Return the most tokens of a pass or of the part that it attends to."""
    return max((max(one.tokens.size, one.stop - one.start) for one in passes), default=0)


@struct
class Spans:
    """The part of each sequence that a pass attends to."""

    start: Int[Array, " b"]
    """The position of its first token."""
    stop: Int[Array, " b"]
    """The position after its last token."""
    first: Int[Array, " b"]
    """The number of the prompt's first entries that the pass attends to in addition."""


def spans(passes: Sequence[Pass | None], batch: int) -> Spans:
    """Return the spans of passes. They are empty for rows without a pass and for rows that pad the batch."""
    table = np.zeros((3, batch), np.int32)
    for row, one in enumerate(passes):
        if one is not None:
            table[:, row] = one.start, one.stop, one.first
    return Spans(*(put(x, BATCH) for x in table))


@functools.partial(jax.jit, donate_argnums=3, static_argnames="first")
def one_pass(
    model: Decoder,
    view: View,
    eviction: Reconstruction | None,
    cache: Cache,
    tokens: Int[Array, "b t"],
    valid: Int[Array, " b"],
    spans: Spans,
    sample: tuple[Float[Array, "l b n r h"], Int[Array, "b r"]] | None = None,
    *,
    first: int,
) -> tuple[Cache, Float[Array, "l b n r h"] | None]:
    """Return the cache after one pass of each sequence, and the reference queries. No span may be longer than the
    padded tokens.

    Args:
        eviction: the method that writes entry metadata; None: nothing is written.
        sample: the reference queries so far, and the indices of the tokens whose queries are added
            (`References.index`).
        first: the number of places for the prompts' first entries.
    """

    def attend(step, metadata, xs):
        (layer, view, eviction, output), step = xs, step.without_padding()
        counts = {"seen": cache.seen, "counted": cache.counted, "valid": valid}
        o, _, _, _ = cached_attention(view, step, cache.pages, layer, **counts, write=False)
        pages = dataclasses.replace(cache.pages, metadata=metadata)
        if eviction is not None:
            metadata = _looked_at(eviction, step, pages, layer, output, valid, spans, first)
        return o, metadata, None if sample is None else sampled(step, sample[1])

    position = positions(cache.seen, valid, tokens.shape[1])
    x, metadata, new, *_ = scan_layers(
        model,
        model.embed_tokens(tokens, frozen=True),
        position,
        attend,
        cache.pages.metadata,
        (cache.layers, view, eviction, output_projections(model)),
        slide=sliding(cache, valid),
        token=tokens,
        frozen=True,
    )
    cache = dataclasses.replace(cache, pages=dataclasses.replace(cache.pages, metadata=metadata))
    if sample is not None:
        new = jnp.where((sample[1] >= 0)[:, None, :, None], new, sample[0])
    return check_finite(cache, x, position >= 0), new


def _looked_at(
    eviction: Reconstruction,
    step: Step,
    pages: Pages,
    layer: LayerCache,
    output: dict[str, Shaped[Array, "_ d"]],
    valid: Int[Array, " b"],
    spans: Spans,
    first: int,
) -> Metadata:
    """Return one layer's entry metadata after a pass's tokens have attended to its entries."""

    def local(eviction, step, pages, layer, output, valid, spans):
        own = spans.start[:, None] + jnp.arange(step.q.shape[2])
        begin = jnp.broadcast_to(jnp.arange(first), (own.shape[0], first))
        exists = jnp.concatenate([begin < spans.first[:, None], own < spans.stop[:, None]], 1)
        place = jnp.concatenate([begin, own], 1)[:, None]
        place = jnp.broadcast_to(place, (*layer.length.shape, place.shape[2]))
        # every token is stored, so there is no local window, and a token's place is its position
        at = addresses(layer, place, pages.pool.shape[1], 0)
        k, v = jnp.split(pages.entries(*at, layer.key_scale), 2, -1)
        numbers = eviction.reconstruct(step, PassEntries(k, v, exists, first, valid, by_head(output, k)))
        end = layer.page_table.shape[-1] * pages.pool.shape[1]
        place = jnp.where(exists[:, None], place, end)
        return pages.metadata | {
            name: placed(pages.metadata[name], layer.page_table, place, x.astype(pages.metadata[name].dtype))
            for name, x in numbers.items()
        }

    specs = specs_of(pages.metadata)
    whole = gather(eviction, "data", "fsdp")
    return jax.shard_map(local, out_specs=specs)(whole, step, pages, layer, output, valid, spans)
