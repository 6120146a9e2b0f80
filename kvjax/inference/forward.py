"""Feeding tokens to a model over its cache: what prefill and decoding have in common."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax import cache as caches
from kvjax.cache import Cache
from kvjax.inference.attention import cached_attention
from kvjax.inference.record import Calls
from kvjax.mesh import BATCH, P, batch_shards, put
from kvjax.models.decoder import Attend, Decoder, scan_layers
from kvjax.policies.policy import Policy, States

CAPTURED = "hidden", "q", "k", "v", "q_pre", "k_pre", "lse", "state"
"""What can be captured of every layer: fields of `Step`, each query's log-sum-exp over all that it saw [b n t], and the
methods' memories after the tokens (`States`)."""


def forward(
    model: Decoder,
    policy: Policy,
    cache: Cache,
    tokens: Int[Array, "b t"],
    valid: Int[Array, " b"],
    *,
    write: bool = True,
    capture: Sequence[str] = (),
    implementation: str | None = None,
) -> tuple[Cache, Float[Array, "b t d"], dict[str, Any]]:
    """Run the first `valid` tokens of each sequence over the cache. To be jitted, the cache donated if it is written.

    Args:
        write: False: they read the cache and each other as if they were written, and leave no trace.
        capture: of `CAPTURED`. What is large is streamed layer by layer by `kvjax.inference.capture`.

    Returns:
        the cache, the hidden states after the final norm, and what was captured, with a leading layer axis. Those of
        padding mean nothing.
    """
    tokens, valid = jax.sharding.reshard((tokens, valid), (P(BATCH, None), P(BATCH)))
    position = positions(cache.seen, valid, tokens.shape[1])
    attend = attending(cache, valid, write, capture, implementation)
    scanned = {"carry": cache.pages if write else None, "as_integers": cache.pages.as_integers}
    x, pages, (layers, captured) = scan_layers(
        model,
        model.embed_tokens(tokens),
        position,
        attend,
        xs=(cache.layers, policy),
        token=tokens,
        **scanned,
    )
    if write:
        cache = dataclasses.replace(cache, pages=pages, layers=layers, seen=cache.seen + valid)
    return cache, model.norm(x), captured


def positions(seen: Int[Array, " b"], valid: Int[Array, " b"], tokens: int) -> Int[Array, "b t"]:
    """The true positions of a call's tokens, −1 for padding."""
    index = jnp.arange(tokens)
    return jnp.where(index < valid[:, None], seen[:, None] + index, -1)


def attending(
    cache: Cache, valid: Int[Array, " b"], write: bool, capture: Sequence[str], implementation: str | None
) -> Attend:
    """`scan_layers`' attention over the cache: carries its pages if they are written; from a layer's cache and policy
    to the layer's cache, if it is written, and what is captured."""

    def attend(step, pages, xs):
        layer, policy = xs
        o, lse, pages, layer = cached_attention(
            policy, step, pages if write else cache.pages, layer,
            seen=cache.seen, valid=valid, write=write, implementation=implementation,
        )  # fmt: skip
        found = {"lse": lse, "state": layer.state}
        captured = {name: found[name] if name in found else getattr(step, name) for name in capture}
        return o, pages if write else None, (layer if write else None, captured)

    return attend


Before = tuple[Int[Array, "count l b k"], Int[Array, "count b"], Bool[Array, "count b"]]
"""What a cache was before each of some steps: lengths of the rows, tokens seen, which sequences ran."""


def decode(
    model: Decoder,
    policy: Policy,
    cache: Cache,
    carry: Any,
    xs: Any,
    fed: Callable[[Any, Any], tuple[Int[Array, " b"], Bool[Array, " b"]]],
    said: Callable[[Any, Any, Float[Array, "b v"]], tuple[Any, Any]],
    *,
    implementation: str | None = None,
) -> tuple[Cache, Any, Any, Before]:
    """A token of each sequence after another, as one scan with the cache as its carry. To be jitted, the cache donated.

    Args:
        carry, xs: as of `jax.lax.scan`, a step for each of `xs`.
        fed: from the carry and a step's x the tokens to run, and which sequences run. Those that do not write nothing.
        said: from these and the logits after the tokens the next carry, and what is returned of the step.

    Returns:
        the cache, the last carry, what was returned of every step, and what the cache was before each.
    """

    def step(carried, x):
        cache, carry = carried
        token, running = fed(carry, x)
        before = cache.layers.length, cache.seen, running
        valid = running.astype(jnp.int32)
        cache, hidden, _ = forward(model, policy, cache, token[:, None], valid, implementation=implementation)
        carry, y = said(carry, x, model.logits(hidden)[:, 0])
        return (cache, carry), (y, before)

    (cache, carry), (ys, before) = jax.lax.scan(step, (cache, carry), xs)
    return cache, carry, ys, before


@functools.partial(jax.jit, donate_argnums=2, static_argnames="implementation")
def last_logits(
    model: Decoder,
    policy: Policy,
    cache: Cache,
    tokens: Int[Array, "b t"],
    valid: Int[Array, " b"],
    implementation: str | None = None,
) -> tuple[Cache, Float[Array, "b v"]]:
    """`forward`, and the logits that follow each sequence's last valid token."""
    cache, hidden, _ = forward(model, policy, cache, tokens, valid, implementation=implementation)
    last = jnp.maximum(valid - 1, 0)[:, None, None]
    return cache, model.logits(jnp.take_along_axis(hidden, last, 1))[:, 0]


@jax.jit
def memories(
    model: Decoder, policy: Policy, cache: Cache, tokens: Int[Array, "b t"], valid: Int[Array, " b"]
) -> States:
    """The eviction's memory after it looked at tokens that leave no other trace."""
    found = forward(model, policy, cache, tokens, valid, write=False, capture=("state",))[2]["state"]
    return dataclasses.replace(cache.layers.state, eviction=found.eviction)


def bucket(tokens: int) -> int:
    """The padded length that a call of `tokens` tokens is compiled for: 16 · 2ⁿ or 24 · 2ⁿ, below 16 as it is."""
    if tokens <= 16:
        return tokens
    size = 16
    while size < tokens:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def padded(rows: list[np.ndarray], size: int) -> tuple[jax.Array, jax.Array]:
    """Rows as one batch on the mesh, padded to `size` tokens and with empty rows to a multiple of the batch shards."""
    shards = batch_shards()
    batch = -(-len(rows) // shards) * shards
    tokens, valid = np.zeros((batch, size), np.int32), np.zeros(batch, np.int32)
    for index, row in enumerate(rows):
        tokens[index, : row.size], valid[index] = row, row.size
    return put(tokens, BATCH, None), put(valid, BATCH)


def feed(
    model: Decoder,
    policy: Policy,
    cache: Cache,
    rows: Sequence[Int[np.ndarray, " _"]],
    chunk: int,
    calls: Calls | None = None,
    implementation: str | None = None,
    logits: Float[Array, "b v"] | None = None,
    room: int = 0,
) -> tuple[Cache, Float[Array, "b v"]]:
    """All of `rows` through the model, `chunk` tokens a call.

    Args:
        cache: it is donated.
        calls: a record to add to.
        logits: of rows that are empty.
        room: tokens that will follow, for the error of a pool that runs out.

    Returns:
        the cache, and the logits after each row's last token.
    """
    longest = max(row.size for row in rows)
    for start in range(0, longest, chunk):
        part = [row[start : start + chunk] for row in rows]
        if calls is not None:
            calls.feed(cache, np.array([row.size for row in part]))
        tokens, valid = padded(part, bucket(min(chunk, longest - start)))
        cache, new = last_logits(model, policy.reading, cache, tokens, valid, implementation=implementation)
        logits = new if logits is None else jnp.where((valid > 0)[:, None], new, logits)
    caches.check(cache, policy.name, room)
    assert logits is not None
    return cache, logits
