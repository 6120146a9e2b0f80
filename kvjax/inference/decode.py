"""Decoding: one token of each sequence after another, in one program, with compactions at the sequences' own times."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import Cache, Quota, check_finite
from kvjax.inference.compaction import compacted
from kvjax.inference.forward import forward
from kvjax.mesh import P
from kvjax.models.decoder import Decoder
from kvjax.policies.compiled import View
from kvjax.struct import static, struct

Before = tuple[Int[Array, "count l b k"], Int[Array, "count b"], Bool[Array, "count b"]]
"""What a cache was before each of some steps: lengths of the rows, tokens seen, which sequences ran."""


@struct
class Recurring:
    """A compaction that comes again and again while decoding."""

    quota: Quota
    """What it keeps, whenever a sequence is due."""
    every: Int[Array, ""]
    """A sequence is, when it has a multiple of so many tokens."""
    over: str = static()
    """Who shares, as of `Shares`."""
    ties: str = static()
    """As of `kvjax.topk.top`."""
    observed: int = static(default=0)
    """How many of the last tokens are looked back at."""

    def __call__(self, model: Decoder, view: View, cache: Cache, running: Bool[Array, " b"]) -> Cache:
        """The cache, compacted if one of the `running` sequences is due."""
        # once the pool ran out nothing is freed, or the debt would be paid before anybody sees it
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

        # a loop of one turn or none: XLA carries a loop's arrays in place, and on a GPU copies those of a branch
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
    implementation: str | None = None,
) -> tuple[Cache, Any, Any, Before]:
    """A token of each sequence after another, as one scan with the cache as its carry. To be jitted, the cache donated.

    Args:
        carry, xs: as of `jax.lax.scan`, a step for each of `xs`.
        feed: from the carry and a step's x the tokens to run, and which sequences run. Those that do not write nothing.
        recurring: a compaction after each token, of the sequences for which it is time.
        advance: from these and the logits after the tokens the next carry, and what is returned of the step.

    Returns:
        the cache, the last carry, what was returned of every step, and what the cache was before each.
    """

    def step(carried, x):
        cache, carry = carried
        token, running = feed(carry, x)
        before = cache.layers.length, cache.seen, running
        valid = running.astype(jnp.int32)
        cache, hidden, _ = forward(model, view, cache, token[:, None], valid, implementation=implementation)
        if recurring is not None:
            cache = recurring(model, view, cache, running)
        logits = model.logits(hidden)
        cache = check_finite(cache, logits, running[:, None])
        carry, y = advance(carry, x, logits[:, 0])
        return (cache, carry), (y, before)

    (cache, carry), (ys, before) = jax.lax.scan(step, (cache, carry), xs)
    return cache, carry, ys, before
