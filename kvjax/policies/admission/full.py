"""The full cache: every token stays."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.policies.base import Admission, Keep
from kvjax.policies.views import Step
from kvjax.struct import struct


@struct
class Full(Admission):
    """Admission of every token. `window` only decides where entries are stored; with 1 there is no local window."""

    window = 1
    name = "full"

    def score(
        self, state: tuple[()], step: Step, seen: Int[Array, " b"], valid: Int[Array, " b"]
    ) -> tuple[tuple[()], Float[Array, "b k t"], int]:
        return state, jnp.ones(step.k.shape[:3], jnp.float32), 0

    def keep(self) -> Keep:
        return Keep(0.0)
