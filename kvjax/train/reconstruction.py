"""KVzip's teacher: the attention that a context's keys get while the context is repeated (arXiv:2505.23416, eq. 2 and
3)."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax import cache as caches
from kvjax.cache import Cache
from kvjax.cache.compaction import addresses
from kvjax.inference.allocation import new_cache
from kvjax.inference.forward import forward, padded, pieces
from kvjax.inference.reconstruction import all_of, reconstruct
from kvjax.mesh import on_host, use_mesh
from kvjax.models.decoder import Decoder, layer_at
from kvjax.policies import Policy, Ratio, Schedule
from kvjax.policies.compiled import View
from kvjax.policies.eviction.kvzip import KVzip
from kvjax.train.contexts import Context
from kvjax.train.targets import Outputs, fill_input, fill_score

PIECE = 1024
"""The number of tokens that are read at a time. A device holds their hidden states of all layers."""


def repetition(tokenizer: Any, prefix: int, *, plus: bool = False) -> Policy:
    """Return the policy whose scores are the targets: KVzip, or KVzip+ with `plus`. `prefix`: the number of tokens
    before every context."""
    return Policy(
        eviction=KVzip(tokenizer=tokenizer, prefix=prefix, plus=plus), schedule=Schedule(Ratio(1.0))
    )


def reconstruction(
    model: Decoder, contexts: Sequence[Context], which: str, outputs: Outputs, *, policy: Policy
) -> None:
    """Fill in the maximum attention that each key gets while its context is repeated. The policy's reconstruction
    passes compute it over a cache that holds the whole contexts."""
    rows = [context.row for context in contexts]
    with use_mesh(model):
        compiled = policy.compile(model)
        cache = new_cache(model, compiled, rows)
        longest, start = max(row.size for row in rows), 0
        for count, size in pieces(longest, PIECE):
            part = [row[start : start + count] for row in rows]
            cache, captured = read_piece(model, compiled.read, cache, *padded(part, size), which=which)
            # padding follows the piece
            captured = on_host(captured)[..., :count, :]
            fill_input(contexts, outputs, captured, which, start=start)
            start += count
        caches.check(cache, policy.name, 0)
        cache = all_of(reconstruct(model, compiled, cache, rows))
        caches.check(cache, policy.name, 0)
        for layer in range(model.config.num_full_layers):
            score = on_host(_scores(cache, np.int32(layer), tokens=longest))
            fill_score(contexts, outputs, layer, score)


@functools.partial(jax.jit, donate_argnums=2, static_argnames="which")
def read_piece(
    model: Decoder,
    view: View,
    cache: Cache,
    tokens: Int[Array, "b t"],
    valid: Int[Array, " b"],
    *,
    which: str,
) -> tuple[Cache, Array]:
    cache, _, captured = forward(model, view, cache, tokens, valid, capture=(which,))
    return cache, captured[which]


@functools.partial(jax.jit, static_argnames="tokens")
def _scores(cache: Cache, layer: Int[Array, ""], *, tokens: int) -> Float[Array, "b k t"]:
    """Return the scores of one layer's tokens from the entry metadata. All tokens are stored, so the index of an entry
    is its position."""
    layer_state = layer_at(cache.layers, layer)

    def local(scores, layer):
        position = jnp.broadcast_to(jnp.arange(tokens), (*layer.length.shape, tokens))
        page, offset = addresses(layer, position, scores.shape[-1], 0)
        return scores[page, offset]

    return jax.shard_map(local, out_specs=jax.typeof(layer_state.length).sharding.spec)(
        cache.pages.metadata["score"], layer_state
    )
