"""Compute logits through the cache, token by token or in chunks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import cache as caches
from kvjax.inference.allocation import empty_cache, sizes_of
from kvjax.inference.forward import forward
from kvjax.inference.key_scale import key_scale
from kvjax.mesh import use_mesh

LENGTH = 40
"""Number of tokens in each sequence."""
TOKENS = np.random.default_rng(0).integers(0, 61, (2, LENGTH))
"""Token ids of two random sequences."""


@functools.partial(jax.jit, donate_argnums=2)
def run(model, view, cache, tokens, valid):
    cache, hidden, _ = forward(model, view, cache, tokens, valid)
    return cache, model.logits(hidden)


def cached_logits(model, policy, tokens, calls, page_size=4, lengths=None, scale=None):
    """Feed the tokens to the cache in calls of the given sizes and return the logits of every token, and the cache.
    `scale` replaces the model's own key scale for int8 entries."""
    lengths = np.full(len(tokens), tokens.shape[1]) if lengths is None else lengths
    with use_mesh(model):
        compiled = policy.compile(model)
        cache = empty_cache(
            compiled, **sizes_of(model.config), batch=len(tokens), tokens=tokens.shape[1], dtype=jnp.float32,
            page_size=page_size, capacity=tokens.shape[1] + policy.window + page_size,
            key_scale=key_scale(model) if scale is None else scale,
        )  # fmt: skip
        out, start = [], 0
        for size in calls:
            part = tokens[:, start : start + size]
            valid = np.clip(lengths - start, 0, part.shape[1]).astype(np.int32)
            fed = jnp.asarray(part, jnp.int32), jnp.asarray(valid)
            cache, logits = run(model, compiled.read, cache, *fed)
            out.append(np.asarray(logits))
            start += size
        caches.check(cache, policy.name)
        return np.concatenate(out, 1), cache
