"""SnapKV (Li et al., 2024, arXiv:2404.14469): later queries look at the same entries as the last queries."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.errors import one_of, whole_number
from kvjax.policies.eviction import queries
from kvjax.policies.views import Stored
from kvjax.struct import assign, static, struct

GROUP = "mean", "max"


@struct
class SnapKV(queries.LastQueries):
    """The attention of the last queries, averaged over them, over a group's query heads and over `pool` neighbouring
    keys (Sec. 4.1, Listing 1; with zeros beyond the edges and for the queries' own keys). WG-KV's composition takes
    maxima instead: over the group for each query, and over the neighbours. The last `observed` entries stay."""

    observed: int = static(default=64)
    """The number of last tokens whose queries are used. These tokens stay."""
    pool: int = static(default=5)
    """The number of neighbouring keys over which attention is pooled."""
    pooling: str = static(default="average")
    """The pooling over neighbours, "average" or "max"."""
    group: str = static(default="mean")
    """The reduction over a group's query heads, "mean" or "max"."""
    name = "snapkv"

    def __post_init__(self):
        assign(
            self,
            observed=whole_number(self.name, "observed", self.observed),
            pool=whole_number(self.name, "pool", self.pool),
        )
        one_of(self.name, "pooling", self.pooling, tuple(queries.POOLING))
        one_of(self.name, "group", self.group, GROUP)

    def score(self, state: tuple[()], stored: Stored) -> Float[Array, "b k s"]:
        observed = self.observed
        if self.group == "mean":
            mass = queries.attention(stored) / observed
        else:
            mass = queries.over_queries(stored, _largest) / observed
        if stored.causal:
            mass = jnp.where(jnp.arange(mass.shape[-1]) < mass.shape[-1] - observed, mass, 0)
        return queries.pooled(mass, self.pool, self.pooling)


def _largest(logits: Float[Array, "b k g w s"]) -> Float[Array, "b k w s"]:
    return jax.nn.softmax(logits, -1).max(2)
