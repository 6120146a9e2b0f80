"""Expected Attention (Devoto et al., 2025, arXiv:2510.00636): the attention that future queries are expected to pay."""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Int

from kvjax.errors import one_of, whole_number
from kvjax.policies.base import Eviction, Number, Observer, ValueWeighted
from kvjax.policies.numbers import real_array
from kvjax.policies.schedule import Needs
from kvjax.policies.views import Shape, Step, Stored
from kvjax.struct import assign, static, struct


class QuerySums(NamedTuple):
    """Sums over the queries before RoPE, by query head."""

    number: Float[Array, " b"]
    """The number of queries."""
    total: Float[Array, "b n h"]
    """Their sum."""
    products: Float[Array, "b n h h"]
    """The sum of q qᵀ."""


@struct
class ExpectedAttention(Observer, ValueWeighted, Eviction):
    """The score (mean over a group of softmax(z) + ε) · ‖v‖₂ with z = (R μ)ᵀ k / √h + kᵀ R Σ Rᵀ k / 2h, the softmax
    over the keys after the sinks (Sec. 3; kvpress 0.5.5's constants).

    1. μ, Σ: mean and covariance of the queries after the sinks, before RoPE.
    2. R: the mean rotation to the next `future` positions.
    3. z: the expected logit of each key. Its softmax is the attention that the key is expected to get.
    4. This attention is averaged over a group's query heads and multiplied by the length of the value.
    """

    future: int = static(default=512)
    """The number of next positions at which queries are expected."""
    sink: int = static(default=4)
    """The number of entries at the start that are not scored and always stay."""
    epsilon: Number = 0.0
    """ε, which is added to the expected attention before values weigh it."""
    values: bool = static(default=True)
    """True if ‖v‖₂ is part of the score; False under CriticalKV."""
    name = "expected_attention"

    def __post_init__(self):
        assign(
            self,
            future=whole_number(self.name, "future", self.future),
            sink=whole_number(self.name, "sink", self.sink, 0),
            epsilon=real_array(self.name, "epsilon", self.epsilon, 0.0),
        )
        one_of(self.name, "values", self.values, (True, False))

    @property
    def needs(self) -> Needs:
        return Needs(first=self.sink)

    @property
    def without_values(self) -> Eviction:
        return replace(self, values=False)

    def init(self, shape: Shape) -> QuerySums:
        b, n, h = shape.batch, shape.kv_heads * shape.group, shape.head_dim
        return QuerySums(jnp.zeros(b), jnp.zeros((b, n, h)), jnp.zeros((b, n, h, h)))

    @jax.default_matmul_precision("highest")
    def observe(
        self, state: QuerySums, step: Step, seen: Int[Array, " b"], valid: Int[Array, " b"]
    ) -> QuerySums:
        counted = step.position >= self.sink
        q = jnp.where(counted[:, None, :, None], step.q_pre.astype(jnp.float32), 0)
        return QuerySums(
            state.number + counted.sum(1),
            state.total + q.sum(2),
            state.products + jnp.einsum("bnti,bntj->bnij", q, q),
        )

    @jax.default_matmul_precision("highest")
    def score(self, state: QuerySums, stored: Stored) -> Float[Array, "b k s"]:
        _, heads, _, h = stored.k.shape
        count = jnp.maximum(state.number, 1)[:, None, None]
        mean = state.total / count
        covariance = state.products / count[..., None] - mean[..., None] * mean[..., None, :]
        rotation = self._mean_rotation(stored)
        mean = jnp.einsum("bij,bnj->bni", rotation, mean)
        covariance = jnp.einsum("bij,bnjk,blk->bnil", rotation, covariance, rotation)
        k = stored.k.astype(jnp.float32)
        grouped = lambda x: rearrange(x, "b (k g) ... -> g b k ...", k=heads)  # noqa: E731
        scored = stored.scored & (stored.place >= self.sink)

        def weights(moments):
            mean, covariance = moments
            spread = jnp.einsum("bksi,bkij->bksj", k, covariance)
            z = jnp.einsum("bksh,bkh->bks", k, mean) * h**-0.5 + (spread * k).sum(-1) / (2 * h)
            return jax.nn.softmax(jnp.where(scored, z, -jnp.inf), -1)

        weight = jax.lax.map(weights, (grouped(mean), grouped(covariance))).mean(0)
        if not self.values:
            return weight
        return (weight + self.epsilon) * jnp.linalg.norm(stored.v.astype(jnp.float32), axis=-1)

    def _mean_rotation(self, stored: Stored) -> Float[Array, "b h h"]:
        """Return the mean of RoPE's rotations to positions seen … seen + future − 1."""
        position = stored.seen[:, None] + jnp.arange(self.future)
        angle = position[..., None].astype(jnp.float32) * stored.frequencies
        cos, sin = (jax.vmap(jnp.diag)((f(angle) * stored.rope_scale).mean(1)) for f in (jnp.cos, jnp.sin))
        rotated = jnp.concatenate([jnp.concatenate([cos, -sin], 2), jnp.concatenate([sin, cos], 2)], 1)
        batch, size, _ = rotated.shape
        identity = jnp.broadcast_to(jnp.eye(stored.k.shape[-1]), (batch, *stored.k.shape[-1:] * 2))
        return identity.at[:, :size, :size].set(rotated)
