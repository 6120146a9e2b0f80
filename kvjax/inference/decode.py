"""Decoding: a program that runs several tokens of each sequence, one after another, and compacts sequences that are
due."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import Cache, Quota, check_finite
from kvjax.inference.compaction import compacted
from kvjax.inference.forward import forward
from kvjax.inference.sampler import Counts, Logprobs, Sampler, draw, log_probabilities
from kvjax.mesh import P
from kvjax.models.decoder import Decoder
from kvjax.policies.compiled import View
from kvjax.struct import static, struct

Before = tuple[Int[Array, "count l b k"], Int[Array, "count b"], Bool[Array, "count b"]]
"""State of a cache before each step: lengths of the head caches, tokens seen, and True for sequences that ran."""


@struct
class Recurring:
    """A compaction that recurs while decoding."""

    quota: Quota
    """The quota of the sequences, applied to those that are due."""
    every: Int[Array, ""]
    """The interval in tokens. A sequence is due when its number of tokens is a multiple of it."""
    over: str = static()
    """The heads that share the budget (`Shares.over`)."""
    ties: str = static()
    """One of `kvjax.topk.TIES`."""
    observed: int = static(default=0)
    """The number of last tokens that are observed."""

    def __call__(self, model: Decoder, view: View, cache: Cache, running: Bool[Array, " b"]) -> Cache:
        """Return the cache, compacted if one of the `running` sequences is due."""
        # once the pool ran out nothing may be freed, or the debt would vanish before the host sees it
        due = running & (cache.seen % self.every == 0) & (cache.pages.free_count >= 0).all()
        sizes = {
            "entries": max(cache.columns * cache.page_size, self.observed),
            "over": self.over,
            "ties": self.ties,
            "causal": view.stores_all,
        }

        def shorter(cache: Cache) -> Cache:
            quota = dataclasses.replace(self.quota, due=due)
            return compacted(model, view.eviction, cache, quota, **sizes)  # pyright: ignore[reportArgumentType]

        # a loop that runs once or not at all: XLA updates a loop's arrays in place, but copies a branch's on a GPU
        times = jax.sharding.reshard(due.any(), P()).astype(jnp.int32)
        return jax.lax.fori_loop(0, times, lambda _, cache: shorter(cache), cache)


def decode(
    model: Decoder,
    view: View,
    cache: Cache,
    carry: Any,
    xs: Any,
    feed: Callable[[Any, Any], tuple[Int[Array, " b"], Bool[Array, " b"]]],
    advance: Callable[[Any, Any, Float[Array, "b v"]], tuple[Any, Any]],
    *,
    recurring: Recurring | None = None,
) -> tuple[Cache, Any, Any, Before]:
    """Run several tokens of each sequence, one after another, as one scan with the cache as its carry. Jit it with the
    cache donated.

    Args:
        carry, xs: as in `jax.lax.scan`, with a step for each of `xs`.
        feed: returns the tokens to run and a mask of the sequences that run, given the carry and a step's x. Sequences
            that do not run write nothing.
        advance: returns the next carry and the step's y, given the carry, x and the logits after the tokens.
        recurring: a compaction after each token, of the sequences that are due.

    Returns:
        the cache, the last carry, every step's y, and the cache's state before each step.
    """

    def step(carried, x):
        cache, carry = carried
        token, running = feed(carry, x)
        before = cache.layers.length, cache.seen, running
        valid = running.astype(jnp.int32)
        cache, hidden, _ = forward(model, view, cache, token[:, None], valid)
        if recurring is not None:
            cache = recurring(model, view, cache, running)
        logits = model.logits(hidden)
        cache = check_finite(cache, logits, running[:, None])
        carry, y = advance(carry, x, logits[:, 0])
        return (cache, carry), (y, before)

    (cache, carry), (ys, before) = jax.lax.scan(step, (cache, carry), xs)
    return cache, carry, ys, before


@functools.partial(jax.jit, donate_argnums=2, static_argnames="count")
def decode_block(
    model: Decoder,
    view: View,
    cache: Cache,
    token: Int[Array, " b"],
    running: Bool[Array, " b"],
    sampler: Sampler,
    drawn_before: Int[Array, "*b"],
    counts: Counts | None = None,
    *,
    count: int,
    limit: Int[Array, ""] | None = None,
    recurring: Recurring | None = None,
) -> tuple[
    Cache,
    tuple[Int[Array, "count b"], Logprobs | None],
    tuple[Int[Array, " b"], Bool[Array, " b"], Counts | None],
    Before,
]:
    """Run `token` and then the drawn tokens, `count` in all. Sequences that are not `running` write nothing, and after
    `limit` tokens (None: `count`) no sequence does.

    The drawn tokens do not depend on the division into blocks, but on the number that were `drawn_before`, which is one
    number for all answers or one for each.

    Returns the cache, the drawn tokens with their log-probabilities if these are wanted, the last tokens with the
    running sequences and the tokens' counts, and the cache's state before each token.
    """
    limit = jnp.int32(count) if limit is None else limit

    def feed_last(carry, index):
        token, running, _ = carry
        return token, running & (index < limit)

    def draw_next(carry, index, logits):
        token, running, counts = carry
        live = running & (index < limit)
        new = jnp.where(live, draw(sampler, logits, drawn_before + index, counts), token)
        counts = None if counts is None else counts.with_token(new, live)
        running &= ~(live & sampler.ends(new, drawn_before + index + 1))
        return (new, running, counts), (new, log_probabilities(sampler, logits, new))

    carry = token, running, counts
    cache, carry, drawn, before = decode(
        model, view, cache, carry, jnp.arange(count), feed_last, draw_next, recurring=recurring
    )
    return cache, drawn, carry, before


@jax.jit
def first_tokens(
    sampler: Sampler, logits: Float[Array, "b v"], live: Bool[Array, " b"], counts: Counts | None
):
    """Draw the first token of each answer. Returns tokens, their log-probabilities, the sequences that continue, and
    the counts."""
    token = draw(sampler, logits, 0, counts)
    counts = None if counts is None else counts.with_token(token, live)
    return token, log_probabilities(sampler, logits, token), live & ~sampler.ends(token, 1), counts
