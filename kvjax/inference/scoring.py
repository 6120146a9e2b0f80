"""The log-probabilities of a prompt's own tokens, over the cache that the policy keeps."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int

from kvjax.cache import Cache
from kvjax.inference.answers import AnswerLogprobs
from kvjax.inference.forward import forward, padded, pieces
from kvjax.inference.prefill import Steps
from kvjax.mesh import P, on_host
from kvjax.models.decoder import Decoder
from kvjax.policies.compiled import CompiledPolicy, View
from kvjax.sampling_params import MAX_ALTERNATIVES

TOGETHER = 16
"""Tokens whose logits are in memory at once."""


def scoring(
    model: Decoder,
    policy: CompiledPolicy,
    row: Int[np.ndarray, " t"],
    chunk: int,
    alternatives: int,
    logprobs: list[AnswerLogprobs],
) -> Steps:
    """Read a prompt and score its tokens in steps, for `kvjax.inference.prefill.next_step`.

    Args:
        chunk: the most tokens in one call.
        alternatives: the number of most likely tokens at each place.
        logprobs: the list that the log-probabilities of all tokens but the first are added to.
    """
    cache, start, last_logits = (yield None), 0, None
    for count, size in pieces(row.size, chunk):
        if start and start % chunk == 0:  # a step is a chunk, as in `reading`
            cache = yield cache
        tokens, valid = padded([row[start : start + count]], size)
        following, _ = padded([row[start + 1 : start + 1 + count]], size)
        cache, last_logits, chosen, ids, values = _scored(model, policy.read, cache, tokens, following, valid)
        counted = min(count, row.size - start - 1)
        start += count
        arrays = (on_host(x)[:counted] for x in (chosen, ids, values))
        logprobs.append(AnswerLogprobs.of(*arrays, count=alternatives))
    assert last_logits is not None
    return cache, last_logits


@functools.partial(jax.jit, donate_argnums=2)
def _scored(
    model: Decoder,
    view: View,
    cache: Cache,
    tokens: Int[Array, "1 t"],
    following: Int[Array, "1 t"],
    valid: Int[Array, " 1"],
) -> tuple[Cache, Float32[Array, "1 v"], Float32[Array, " t"], Int[Array, "t m"], Float32[Array, "t m"]]:
    """Return the cache after a call, the logits after its last token, and for each token the log-probability of the
    following one and the most likely tokens with their log-probabilities."""
    cache, hidden, _ = forward(model, view, cache, tokens, valid)
    hidden = jax.sharding.reshard(hidden, P(None, None, None))
    together = math.gcd(hidden.shape[1], TOGETHER)
    parts = hidden.reshape(-1, 1, together, hidden.shape[-1])

    def scored_part(part):
        hidden, target = part
        logits = jax.sharding.reshard(model.logits(hidden), P(None, None, None))[0]
        norm = jax.nn.logsumexp(logits, -1, keepdims=True)
        chosen = jnp.take_along_axis(logits, target[:, None], 1) - norm
        values, ids = jax.lax.top_k(logits, min(MAX_ALTERNATIVES, logits.shape[-1]))
        return chosen[:, 0], ids.astype(jnp.int32), values - norm

    following = jax.sharding.reshard(following, P(None, None)).reshape(-1, together)
    chosen, ids, values = (x.reshape(-1, *x.shape[2:]) for x in jax.lax.map(scored_part, (parts, following)))
    last = jax.lax.dynamic_slice_in_dim(hidden, valid[0] - 1, 1, 1)
    return cache, model.logits(last)[:, 0], chosen, ids, values
