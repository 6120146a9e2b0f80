"""DropKV (Zhang et al., NeurIPS 2026, OpenReview MqfNzH3TVH): the change of attention's output without an entry."""

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float

from kvjax.errors import one_of, whole_number
from kvjax.policies.eviction import queries
from kvjax.policies.views import Stored
from kvjax.struct import assign, static, struct

EPSILON = 1e-6
"""The number that is added to 1 − p, so that the divisor is not 0."""


@struct
class DropKV(queries.LastQueries):
    """The sum over the last queries of (p / (1 − p))² ‖v − o‖², averaged over a group's query heads and then over
    `pool` neighbouring entries, with zeros beyond the edges. p is the attention that the query pays to the entry, v
    the entry's value, and o the query's output before W_O.

    Without the entry, attention to the others would be scaled up to a sum of 1, which would move o by
    p / (1 − p) · (o − v). The score is thus the squared change if this entry alone were dropped.

    The defaults come from the authors' kvpress/presses/dropkv_press.py (NVIDIA/kvpress, pull request 285). The
    evaluation in their own repository (AozhongZhang/DropKV) is `observed=8,pool=11,pooling=max`.
    """

    observed: int = static(default=32)
    """The number of last tokens whose queries are used. These tokens stay."""
    pool: int = static(default=7)
    """The number of neighbouring entries over which scores are pooled."""
    pooling: str = static(default="average")
    """The pooling over neighbours, "average" or "max"."""
    name = "dropkv"

    def __post_init__(self):
        assign(
            self,
            observed=whole_number(self.name, "observed", self.observed),
            pool=whole_number(self.name, "pool", self.pool),
        )
        one_of(self.name, "pooling", self.pooling, tuple(queries.POOLING))

    @jax.default_matmul_precision("highest")
    def score(self, state: tuple[()], stored: Stored) -> Float[Array, "b k s"]:
        # the values of places without an entry may be anything, and a product with them may be NaN
        v = jnp.where(stored.scored[..., None], stored.v.astype(jnp.float32), 0)

        def change(logits):
            p = queries.attention_to_visible(logits)
            output = jnp.einsum("bkgws,bksh->bkgwh", p, v)
            product = jnp.einsum("bksh,bkgwh->bkgws", v, output)
            distance = _square(v)[:, :, None, None] - 2 * product + _square(output)[..., None]
            # where p is nearly 1, o is nearly v, and rounding would cancel the difference
            strongest = p.argmax(-1)
            at = rearrange(strongest, "b k g w -> b k (g w) 1")
            exact = _square(jnp.take_along_axis(v, at, 2).reshape(output.shape) - output)
            is_strongest = jnp.arange(p.shape[-1]) == strongest[..., None]
            distance = jnp.where(is_strongest, exact[..., None], jnp.maximum(distance, 0))
            return (jnp.square(p / (1 - p + EPSILON)) * distance).mean(2)

        return queries.pooled(queries.over_queries(stored, change), self.pool, self.pooling)


def _square(x: Float[Array, "*r h"]) -> Float[Array, "*r"]:
    return jnp.square(x).sum(-1)
