"""The last queries of every sequence, for methods that score entries by their attention."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float

from kvjax.policies.base import Eviction, Guided, Observer
from kvjax.policies.numbers import EXACT
from kvjax.policies.schedule import Needs
from kvjax.policies.views import Shape, Step, Stored
from kvjax.struct import changed
from pallas_kernels.attention_mass import attention_mass


class LastQueries(Guided, Observer, Eviction):
    """An eviction whose observation buffer holds the last `observed` queries. Their tokens stay, unless they are
    guidance or `protected` says otherwise."""

    observed: int

    @property
    def needs(self) -> Needs:
        return Needs(last=self.observed, observed=self.observed)

    def guided(self, tokens: int) -> Eviction:
        """Return a copy that observes all tokens of guidance, or the eviction itself if it has no argument
        `observed`."""
        names = [field.name for field in dataclasses.fields(self)]  # pyright: ignore[reportArgumentType]
        return changed(self, observed=tokens) if "observed" in names else self

    def observations(self, shape: Shape) -> Float[Array, "b w n h"]:
        heads = shape.kv_heads * shape.group
        return jnp.zeros((shape.batch, self.observed, heads, shape.head_dim), shape.dtype)

    def record(self, step: Step) -> Float[Array, "b n t h"]:
        return step.q


def attention(stored: Stored) -> Float[Array, "b k s"]:
    """Return the attention that each scored entry gets from the last queries, over those entries alone: the sum over
    the queries, the mean over the query heads of its group."""
    q, offset = stored.observations.astype(stored.k.dtype), 0 if stored.causal else None
    return attention_mass(q, stored.k, over="sum", group="mean", offset=offset, valid=stored.scored)


REDUCE = {"sum": (0.0, jnp.add, jnp.sum), "max": (-jnp.inf, jnp.maximum, jnp.max)}
"""The initial value of a reduction, its function of two numbers, and its function of an axis."""
QUERY_BLOCK = 8
"""The most queries that `over_queries` processes at a time."""


def over_queries(
    stored: Stored,
    weigh: Callable[[Float[Array, "b k g w s"]], Float[Array, "b k w s"]],
    reduce: str = "sum",
) -> Float[Array, "b k s"]:
    """Return the sum, or with "max" the maximum, over the last queries of `weigh(logits)`. A logit is −inf where the
    query does not see the entry. This is for methods that combine a group's query heads query by query."""
    q = rearrange(stored.observations.astype(stored.k.dtype), "b (k g) w h -> w b k g h", k=stored.k.shape[1])
    window, entries = len(q), stored.k.shape[2]
    block = math.gcd(window, QUERY_BLOCK)
    index = jnp.arange(entries)
    initial, merge, within = REDUCE[reduce]

    def add_block(total, inputs):
        q, newest = inputs
        logits = jnp.einsum("wbkgh,bksh->bkgws", q, stored.k, **EXACT)
        visible = stored.scored[:, :, None, None]
        if stored.causal:
            visible &= index <= newest[:, None]
        logits = jnp.where(visible, logits * q.shape[-1] ** -0.5, -jnp.inf)
        return merge(total, within(weigh(logits), axis=2)), None

    newest = entries - window + jnp.arange(window)
    blocks = q.reshape(-1, block, *q.shape[1:]), newest.reshape(-1, block)
    return lax.scan(add_block, jnp.full_like(stored.k[..., 0], initial, jnp.float32), blocks)[0]


def attention_to_visible(logits: Float[Array, "*r s"]) -> Float[Array, "*r s"]:
    """Return the softmax of the logits of `over_queries`: 0 everywhere for a query that sees no entry."""
    return jax.nn.softmax(logits, -1, where=logits > -jnp.inf)


POOLING = {"average": (0.0, lax.add), "max": (-jnp.inf, lax.max)}
"""The initial value of a pooling, and its function of two numbers."""


def pooled(x: Float[Array, "*r s"], size: int, how: str = "average") -> Float[Array, "*r s"]:
    """Return the average over `size` neighbours, with zeros beyond the edges, or with "max" the largest of them."""
    initial, reduce = POOLING[how]
    edges = (size - 1) // 2, size // 2
    others = (1,) * (x.ndim - 1)
    padding = (*((0, 0) for _ in others), edges)
    total = lax.reduce_window(x, initial, reduce, (*others, size), (*others, 1), padding)
    return total / size if how == "average" else total
