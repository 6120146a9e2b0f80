"""Attention of sliding-window layers over the cache."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.cache import Cache
from kvjax.cache.observations import newest
from kvjax.cache.sliding import as_pages, bias, in_order, recent, used_slots, written
from kvjax.mesh import BATCH, HEADS, SHARDS, P
from kvjax.models.decoder import Attend
from kvjax.models.layers import attention_on_replicas
from kvjax.policies.views import Step
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.softmax import with_sink
from pallas_kernels.vertical_slash import ends

SPLIT = P(BATCH, HEADS)


def sliding(cache: Cache, valid: Int[Array, " b"]) -> Attend:
    """Return the attention of sliding-window layers over the cache, for the first `valid` tokens of each sequence, as
    `scan_layers` calls it. Its y is the newest entries [b k n 2h], for `with_windows`."""
    window, dtype = cache.sliding_window, cache.pages.dtype

    def local(step: Step, windows, dropped, mask_bias, seen, valid):
        kv = jnp.concatenate([step.k, step.v], -1)
        if step.q.shape[2] == 1:
            pool, table = as_pages(windows, step.layer)
            no_entries = jnp.zeros(table.shape[:2], jnp.int32)
            length_of_window = jnp.minimum(seen, used_slots(windows, window))
            new = step.k, step.v
            if dropped is None:
                o, lse = paged_decode(
                    step.q, pool, table, no_entries, length_of_window, ring_pages=table.shape[2], new=new
                )
            else:  # `paged_decode` gives entries of ring pages no bias
                length = jnp.broadcast_to(length_of_window[:, None], table.shape[:2])
                o, lse = paged_decode(step.q, pool, table, length, bias=mask_bias, new=new)
            return with_sink(o, lse, step.sink)[0], kv
        earlier, exists = recent(windows, step.layer, seen, window, dtype)
        k, v = jnp.split(jnp.concatenate([earlier.astype(step.k.dtype), kv], 2), 2, -1)
        if dropped is not None:
            exists &= ~in_order(dropped, windows, seen, window)
        exists = jnp.pad(exists, ((0, 0), (0, kv.shape[2])), constant_values=True)
        end = ends(jnp.zeros(k.shape[:3], bool), window)
        # a slot that was never written may hold anything
        end = jnp.where(exists[:, None], end, 0)
        result = attention_on_replicas(step.q, k, v, end, window=window)
        return with_sink(*result, step.sink)[0], newest(kv, used_slots(windows, window), valid)

    mask_bias = None
    if cache.dropped_slots is not None and cache.sliding is not None:  # once for all layers
        mask_bias = jax.shard_map(bias, out_specs=P(SHARDS, None))(cache.dropped_slots, cache.sliding)

    def attend(step: Step, carry: Any, xs: None):
        step = step.without_padding()
        stored = cache.sliding, cache.dropped_slots, mask_bias, cache.seen
        o, new = jax.shard_map(local, out_specs=(SPLIT, SPLIT))(step, *stored, valid)
        return o, carry, new

    return attend


def with_windows(
    cache: Cache, new: Float[Array, "l b k n kv"] | None, valid: Int[Array, " b"]
) -> tuple[Shaped[Array, "l b k s kv"] | None, Bool[Array, "b s"] | None]:
    """Return the cache's windows after the newest entries of a call were written, and the mask of dropped tokens."""
    if new is None:
        return cache.sliding, cache.dropped_slots

    def local(windows, dropped, new, seen, valid):
        return written(windows, dropped, new, seen, valid, cache.sliding_window)

    specs = P(None, BATCH, HEADS), P(BATCH)
    return jax.shard_map(local, out_specs=specs)(cache.sliding, cache.dropped_slots, new, cache.seen, valid)
