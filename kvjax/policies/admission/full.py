"""The full cache: every token stays."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.errors import whole_number
from kvjax.policies.interfaces import Admission, Keep
from kvjax.policies.policy import Policy
from kvjax.step import Step
from kvjax.struct import struct


@struct
class Full(Admission):
    """Every token is admitted."""

    def score(
        self, state: tuple[()], step: Step, seen: Int[Array, " b"], valid: Int[Array, " b"]
    ) -> tuple[tuple[()], Float[Array, "b k t"], int]:
        return state, jnp.ones(step.k.shape[:3], jnp.float32), 0

    def keep(self) -> Keep:
        return Keep(jnp.float32(0))


def full(*, window: int = 1) -> Policy:
    """Plain attention over everything. The window changes nothing but where entries lie; 1 leaves no ring."""
    return Policy(Full(), name="full", window=whole_number("full", "window", window))


def stores_all(policy: Policy) -> bool:
    """Whether every token is stored for good as it comes: all are admitted, and there is no ring."""
    return isinstance(policy.admission, Full) and policy.window == 1
