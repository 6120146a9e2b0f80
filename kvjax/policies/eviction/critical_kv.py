"""CriticalKV (Feng et al., 2025, arXiv:2502.03805): what an entry would add to the output, not attention alone."""

from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Int

from kvjax.errors import real_number
from kvjax.policies.eviction.method import Method
from kvjax.policies.interfaces import Eviction, Numbers, Planes, State
from kvjax.step import Attended, Step, Stored
from kvjax.struct import static, struct
from kvjax.top import top


@struct
class CriticalKV(Eviction):
    """Another method's best `first` of the places stay; the rest by (score + ε) · mean over the group of ‖W_O v‖₁
    (Alg. 1)."""

    base: Eviction
    first: float = static()
    epsilon: float = static()

    @property
    def planes(self) -> Mapping[str, str]:
        return self.base.planes

    @property
    def alone(self) -> str:
        return self.base.alone

    @property
    def looks(self) -> bool:
        return self.base.looks

    def init(self, batch: int, heads: int) -> State:
        return self.base.init(batch, heads)

    def numbers(self, state: State, step: Step, attended: Attended) -> Numbers:
        return self.base.numbers(state, step, attended)

    def update(self, state: State, planes: Planes, step: Step, attended: Attended) -> Planes:
        return self.base.update(state, planes, step, attended)

    def observe(self, state: State, step: Step, seen: Int[Array, " b"], valid: Int[Array, " b"]) -> State:
        return self.base.observe(state, step, seen, valid)

    def score(self, state: State, stored: Stored) -> Float[Array, "b k s"]:
        score = self.base.score(state, stored)
        ranked = jnp.where(stored.forced, jnp.inf, score)
        places = jnp.maximum(1, (stored.count * self.first).astype(jnp.int32))
        pinned = top(ranked[None], stored.eligible[None], places[None], "head")[0]
        return jnp.where(pinned, jnp.inf, (score + self.epsilon) * _output_norm(stored))


def _output_norm(stored: Stored) -> Float[Array, "b k s"]:
    heads = stored.v.shape[1]
    weights = rearrange(stored.output, "(k g) h d -> g k h d", k=heads)

    def head(weight):
        out = jnp.einsum("bksh,khd->bksd", stored.v, weight, preferred_element_type=jnp.float32)
        return jnp.abs(out).sum(-1)

    # a head at a time: all outputs are as many numbers as the layer's activations for each of a group's heads
    return jax.lax.map(head, weights).mean(0)


def critical_kv(base: Method, *, first: float = 0.5, epsilon: float = 1e-4) -> Method:
    """Over the scores of `base`."""
    first = real_number("critical_kv", "first_stage", first, 0.0, 1.0)
    epsilon = real_number("critical_kv", "epsilon", epsilon, 0.0)
    return replace(base, eviction=CriticalKV(base.eviction, first, epsilon))
