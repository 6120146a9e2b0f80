"""The last queries of every sequence, for methods that score entries by what was looked at last."""

import math
from collections.abc import Callable

import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float, Int

from kvjax.policies.interfaces import Eviction, Needs
from kvjax.step import Shape, Step, Stored
from pallas_kernels.attention_mass import attention_mass

Queries = Float[Array, "b n w h"]
"""The query of position i is in slot i mod w."""


class LastQueries(Eviction):
    """A method whose memory is the last `observed` queries, of the tokens that always stay."""

    observed: int

    @property
    def needs(self) -> Needs:
        return Needs(last=self.observed, observed=self.observed)

    def init(self, shape: Shape) -> Queries:
        heads = shape.kv_heads * shape.group
        return jnp.zeros((shape.batch, heads, self.observed, shape.head_dim), shape.dtype)

    def observe(self, state: Queries, step: Step, seen: Int[Array, " b"], valid: Int[Array, " b"]) -> Queries:
        return remember(state, step, seen, valid)


def remember(queries: Queries, step: Step, seen: Int[Array, " b"], valid: Int[Array, " b"]) -> Queries:
    """With the queries of a call's first `valid` tokens."""
    window, tokens = queries.shape[2], step.q.shape[2]
    index = jnp.arange(min(window, tokens)) + jnp.maximum(valid - window, 0)[:, None]
    new = jnp.take_along_axis(step.q, jnp.minimum(index, tokens - 1)[:, None, :, None], 2)
    slot = jnp.where(index < valid[:, None], (seen[:, None] + index) % window, window)
    b, n = jnp.ogrid[: queries.shape[0], : queries.shape[1]]
    return queries.at[b[..., None], n[..., None], slot[:, None]].set(new.astype(queries.dtype), mode="drop")


def _in_order(queries: Queries, stored: Stored) -> Queries:
    """The oldest first, in the keys' type."""
    window = queries.shape[2]
    slot = (stored.seen[:, None] + jnp.arange(window)) % window
    return jnp.take_along_axis(queries, slot[:, None, :, None], 2).astype(stored.k.dtype)


def attention(queries: Queries, stored: Stored) -> Float[Array, "b k s"]:
    """The attention that each scored entry gets of these queries, over those entries alone: the sum over the queries,
    the mean over the query heads of its group."""
    q, offset = _in_order(queries, stored), 0 if stored.causal else None
    return attention_mass(q, stored.k, over="sum", group="mean", offset=offset, valid=stored.scored)


def total(
    queries: Queries,
    stored: Stored,
    weigh: Callable[[Float[Array, "b k g w s"]], Float[Array, "b k w s"]],
    block: int = 8,
) -> Float[Array, "b k s"]:
    """The sum over the queries of what `weigh` makes of their logits, −inf where a query sees nothing. For methods that
    put a group's query heads together query by query; `block` queries at a time."""
    q = rearrange(_in_order(queries, stored), "b (k g) w h -> w b k g h", k=stored.k.shape[1])
    window, entries = len(q), stored.k.shape[2]
    block = math.gcd(window, block)
    index = jnp.arange(entries)

    def some(sum_, inputs):
        q, newest = inputs
        logits = jnp.einsum("wbkgh,bksh->bkgws", q, stored.k, preferred_element_type=jnp.float32)
        visible = stored.scored[:, :, None, None]
        if stored.causal:
            visible &= index <= newest[:, None]
        logits = jnp.where(visible, logits * q.shape[-1] ** -0.5, -jnp.inf)
        return sum_ + weigh(logits).sum(2), None

    newest = entries - window + jnp.arange(window)
    blocks = q.reshape(-1, block, *q.shape[1:]), newest.reshape(-1, block)
    zero = jnp.zeros_like(stored.k[..., 0], jnp.float32)
    return lax.scan(some, zero, blocks)[0]


POOLING = {"average": (0.0, lax.add), "max": (-jnp.inf, lax.max)}


def pooled(x: Float[Array, "b k s"], size: int, how: str = "average") -> Float[Array, "b k s"]:
    """The average over `size` neighbours, with zeros beyond the edges, or the largest of them."""
    start, reduce = POOLING[how]
    around = (size - 1) // 2, size // 2
    found = lax.reduce_window(x, start, reduce, (1, 1, size), (1, 1, 1), ((0, 0), (0, 0), around))
    return found / size if how == "average" else found
