"""DefensiveKV (Feng et al., 2025, arXiv:2510.13334): an entry that any one of the last queries needed may be needed
again."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from kvjax.errors import one_of, whole_number
from kvjax.mesh import HEADS
from kvjax.policies.base import Eviction, ValueWeighted
from kvjax.policies.budget import Shares
from kvjax.policies.eviction import queries
from kvjax.policies.eviction.critical_kv import output_norm
from kvjax.policies.schedule import Schedule
from kvjax.policies.views import Stored
from kvjax.struct import assign, static, struct
from kvjax.topk import top

FIRST_STAGE = 0.9
"""The share of the attention that the entries of the first stage get together."""
TINY = jnp.finfo(jnp.float32).tiny


@struct
class DefensiveKV(queries.LastQueries, ValueWeighted):
    """The score is risk · n / Σ n, and the entries that get most of the attention stay before all others. The heads of
    a layer share the budget. With `adakv.over=model,adakv.pinned=0.0` all layers do, which is Layer-DefensiveKV.

    1. The attention of each of the last queries to the older entries is averaged over `pool` neighbouring keys, with
       zeros beyond the edges, and scaled back to its sum.
    2. The risk is the largest of it over these queries and over a group's query heads, and at least the mean of these
       maxima over the head's entries (the worst case, and the correction for the queries that were not observed).
    3. n is the mean over the group of ‖W_O v‖₁, and Σ n its sum over all kv heads for the same token.
    4. First stage: each head's entries with the highest mean attention get the layer's largest score. They are as many
       as together get less than the share 0.9 − β of it, but at most r · m − `observed` of the head's m older entries,
       where r is the share of a head's entries that stay on average. β is the mean over heads and queries of the
       attention to the last `observed` of the older entries.

    These steps follow the authors' code (kvpress/presses/efficient_defensivekv_press.py and
    efficient_layer_defensivekv_press.py). The paper describes CriticalKV and AdaKV with another aggregation. That is
    `defensive_kv:critical_kv,adakv`, and has neither Σ n nor β. β may be a mistake: the code computes it after it has
    cut off the observed tokens, and their own attention would make more sense. Two things are not copied: the code
    computes β and the largest score over a batch, and its Layer- form may drop observed tokens.
    """

    observed: int = static(default=32)
    """The number of last tokens whose queries are used. These tokens stay."""
    pool: int = static(default=5)
    """The number of neighbouring keys over which attention is averaged."""
    values: bool = static(default=True)
    """True for steps 3 and 4; False for the risk alone, as under CriticalKV."""
    name = "defensive_kv"

    def __post_init__(self):
        assign(
            self,
            observed=whole_number(self.name, "observed", self.observed),
            pool=whole_number(self.name, "pool", self.pool),
        )
        one_of(self.name, "values", self.values, (True, False))

    @property
    def shares(self) -> Shares:
        return Shares(over="layer")

    @property
    def without_values(self) -> Eviction:
        return replace(self, values=False)

    def refusal(self, schedule: Schedule, stores_all: bool) -> str:
        once = schedule.trigger.when == "prompt" or schedule.by_chunk
        if not self.values or (stores_all and once):
            return ""
        return (
            "compares the values of a token in all heads of a layer, which hold different tokens under an admission or "
            "after a compaction: values must be false"
        )

    def score(self, state: tuple[()], stored: Stored) -> Float[Array, "b k s"]:
        entries = stored.scored.shape[-1]
        end = entries - self.observed if stored.causal else entries
        index = jnp.arange(entries)
        older = stored.scored & (index < end)
        risk = self._risk(stored, older)
        if not self.values:
            return risk
        # the values of places without an entry may be anything
        norm = jnp.where(older, output_norm(stored.v, stored.output), 0)
        score = risk * norm / jnp.maximum(lax.psum(norm.sum(1, keepdims=True), HEADS), TINY)
        mean = jnp.where(older, queries.attention(stored) / self.observed, 0)
        beta = lax.pmean(jnp.where(index >= end - self.observed, mean, 0).sum(-1).mean(1), HEADS)
        first = _first_stage(mean, stored, older, FIRST_STAGE - beta[:, None, None])
        largest = lax.pmax(jnp.where(older, score, 0).max((1, 2)), HEADS)
        return jnp.where(first, largest[:, None, None], score)

    def _risk(self, stored: Stored, older: Bool[Array, "b k s"]) -> Float[Array, "b k s"]:
        def worst(logits):
            mask = older[:, :, None, None]
            attention = jnp.where(mask, jax.nn.softmax(logits, -1), 0)
            smooth = jnp.where(mask, queries.pooled(attention, self.pool), 0)
            before, after = (x.sum(-1, keepdims=True) for x in (attention, smooth))
            return (smooth * (before / jnp.maximum(after, TINY))).max(2)

        risk = queries.over_queries(stored, worst, "max")
        mean = risk.sum(-1, keepdims=True) / jnp.maximum(older.sum(-1, keepdims=True), 1)
        return jnp.maximum(risk, mean)


def _first_stage(
    mean: Float[Array, "b k s"], stored: Stored, older: Bool[Array, "b k s"], share: Float[Array, "b 1 1"]
) -> Bool[Array, "b k s"]:
    """Return a mask of each head's entries of highest mean attention that together get less than `share` of it. They
    are at most the average number of places of older entries, minus the forced entries."""
    part = mean / jnp.maximum(mean.sum(-1, keepdims=True), TINY)
    reached = jnp.cumsum(-jnp.sort(-part, -1), -1)
    count = (reached < share).sum(-1, dtype=jnp.int32)
    eligible, observed = (x.sum(-1, dtype=jnp.int32) for x in (stored.eligible, stored.eligible & ~older))
    # the floor of count · (all − observed) / all: the product of the first two could exceed an int32
    of_older = stored.count + (-stored.count * observed) // jnp.maximum(eligible, 1)
    free = of_older - stored.forced.sum(-1, dtype=jnp.int32)
    places = jnp.clip(count, 0, jnp.maximum(free, 0))
    return top(part[None], (older & stored.eligible & ~stored.forced)[None], places[None], "head")[0]
