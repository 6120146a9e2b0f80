"""R-KV (Cai et al., 2025, arXiv:2505.24133): entries that are important and not redundant stay, for long reasoning."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kvjax.errors import whole_number
from kvjax.policies.base import Number
from kvjax.policies.eviction import queries
from kvjax.policies.numbers import real_array
from kvjax.policies.schedule import Needs
from kvjax.policies.views import Stored
from kvjax.struct import assign, host, static, struct

ROWS = 128
"""The number of keys whose similarity to all others is computed at a time."""


@struct
class RKV(queries.LastQueries):
    """The score λ · importance − (1 − λ) · redundancy (Sec. 3.4, eq. 5).

    Importance (eq. 2 and 3) is the largest logit of a group's query heads, its softmax over the keys before the last
    `observed`, the mean over these tokens' queries, and the maximum over `pool` neighbours. Redundancy (eq. 4) is the
    softmax over the keys of the mean cosine with the others. A key is left out of the mean of the last key whose cosine
    with it is above `alike`, so that the newest of several similar keys stays. The last `observed` and the first
    `sink` entries stay.

    The defaults come from the authors' code (rkv/compression/r1_kv.py). Fast KVzip's code uses `balance=0.1, sink=4`.
    One thing is not copied: in the authors' code, a key with no similar key is left out of the mean of the very first
    key, which eq. 4 does not say.
    """

    observed: int = static(default=8)
    """The number of last tokens whose queries are used. These tokens stay."""
    pool: int = static(default=7)
    """The number of neighbours over which the maximum is taken."""
    balance: Number = 0.07
    """λ, the weight of importance."""
    alike: Number = 0.5
    """The cosine above which two keys are alike."""
    sink: int = host(default=0)
    """The number of entries at the start that always stay."""
    name = "r_kv"

    def __post_init__(self):
        assign(
            self,
            observed=whole_number(self.name, "observed", self.observed),
            pool=whole_number(self.name, "pool", self.pool),
            balance=real_array(self.name, "balance", self.balance, 0.0, 1.0),
            alike=real_array(self.name, "alike", self.alike),
            sink=whole_number(self.name, "sink", self.sink, 0),
        )

    @property
    def needs(self) -> Needs:
        return super().needs._replace(first=self.sink)

    def score(self, state: tuple[()], stored: Stored) -> Float[Array, "b k s"]:
        older = stored.scored
        if stored.causal:
            older &= jnp.arange(older.shape[-1]) < older.shape[-1] - self.observed

        def attention(logits):
            return queries.attention_to_visible(jnp.where(older[:, :, None], logits.max(2), -jnp.inf))

        mean = queries.over_queries(stored, attention) / self.observed
        importance = queries.pooled(mean, self.pool, "max")
        return self.balance * importance - (1 - self.balance) * self._redundancy(stored)

    @jax.default_matmul_precision("highest")
    def _redundancy(self, stored: Stored) -> Float[Array, "b k s"]:
        exists, entries = stored.scored, stored.k.shape[2]
        k = jnp.where(exists[..., None], stored.k.astype(jnp.float32), 0)
        k /= jnp.linalg.norm(k, axis=-1, keepdims=True) + 1e-8
        index = jnp.arange(entries)

        def rows(total, first):
            row = first + jnp.arange(ROWS)
            part = jnp.take(k, row, axis=2, mode="fill", fill_value=0)
            cosine = jnp.einsum("bkrh,bksh->bkrs", part, k)
            cosine = jnp.where(row[:, None] == index, 0, cosine)
            last = jnp.where(cosine > self.alike, index, -1).max(-1, keepdims=True)
            return total + jnp.where(index == last, 0, cosine).sum(2), None

        total, _ = lax.scan(rows, jnp.zeros_like(k[..., 0]), jnp.arange(0, entries, ROWS))
        mean = total / jnp.maximum(exists.sum(-1, keepdims=True), 1)
        return jax.nn.softmax(jnp.where(exists, mean, -jnp.inf), -1)
