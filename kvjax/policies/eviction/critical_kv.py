"""CriticalKV (Feng et al., 2025, arXiv:2502.03805): the score counts what an entry adds to the output, too."""

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float

from kvjax.errors import real_number
from kvjax.policies.base import Eviction, State, ValueWeighted
from kvjax.policies.budget import Threshold
from kvjax.policies.eviction.wrapper import Wrapper
from kvjax.policies.numbers import EXACT
from kvjax.policies.schedule import Schedule
from kvjax.policies.views import Stored
from kvjax.struct import assign, changed, static, struct
from kvjax.topk import top


@struct
class CriticalKV(Wrapper):
    """A wrapper whose score also counts what values add to the output (Alg. 1). The share `first_stage` of the places
    goes to the entries with the best scores of the wrapped method. The other places go to the entries with the highest
    (score + ε) · mean over the group of ‖W_O v‖₁. Values count only once: the wrapped method scores without them
    (`ValueWeighted`)."""

    first_stage: float = static(default=0.5)
    """The share of the places that go by the wrapped method's scores alone, from 0 to 1."""
    epsilon: float = static(default=1e-4)
    """ε, which keeps a score of 0 from hiding the values."""
    name = "critical_kv"

    def __post_init__(self):
        super().__post_init__()
        first = real_number(self.name, "first_stage", self.first_stage, 0.0, 1.0)
        epsilon = real_number(self.name, "epsilon", self.epsilon, 0.0)
        assign(self, eviction=_without_values(self.eviction), first_stage=first, epsilon=epsilon)

    def refusal(self, schedule: Schedule, stores_all: bool) -> str:
        if isinstance(schedule.budget, Threshold):
            return "divides the places of a budget, and a threshold has none"
        return super().refusal(schedule, stores_all)

    def score(self, state: State, stored: Stored) -> Float[Array, "b k s"]:
        score = self.eviction.score(state, stored)
        ranked = jnp.where(stored.forced, jnp.inf, score)
        places = jnp.maximum(1, (stored.count * self.first_stage).astype(jnp.int32))
        places = jnp.minimum(places, stored.count)
        pinned = top(ranked[None], stored.eligible[None], places[None], "head")[0]
        return jnp.where(pinned, jnp.inf, (score + self.epsilon) * output_norm(stored.v, stored.output))


def _without_values(eviction: Eviction) -> Eviction:
    if isinstance(eviction, CriticalKV):
        return eviction.eviction
    if isinstance(eviction, Wrapper):
        return changed(eviction, eviction=_without_values(eviction.eviction))
    return eviction.without_values if isinstance(eviction, ValueWeighted) else eviction


def output_norm(v: Float[Array, "b k s h"], output: Float[Array, "n h d"]) -> Float[Array, "b k s"]:
    """Return the mean over a group's query heads of ‖W_O v‖₁ for each entry."""
    weights = rearrange(output, "(k g) h d -> g k h d", k=v.shape[1])

    def head(weight):
        # float32 factors, because XLA cannot compute this product of bfloat16 numbers on a CPU
        out = jnp.einsum("bksh,khd->bksd", v.astype(jnp.float32), weight.astype(jnp.float32), **EXACT)
        return jnp.abs(out).sum(-1)

    # one head of a group at a time, because the outputs of all heads would take too much memory
    return jax.lax.map(head, weights).mean(0)
