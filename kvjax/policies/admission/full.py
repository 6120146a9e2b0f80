"""The full cache: every token stays."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.policies.interfaces import Admission, Keep
from kvjax.step import Step
from kvjax.struct import struct


@struct
class Full(Admission):
    """Every token is admitted. The window changes nothing but where entries lie; 1 leaves no ring."""

    window = 1
    name = "full"

    def score(self, state: tuple[()], step: Step) -> tuple[tuple[()], Float[Array, "b k t"], int]:
        return state, jnp.ones(step.k.shape[:3], jnp.float32), 0

    def keep(self) -> Keep:
        return Keep(jnp.float32(0))

    def admitted(self, tokens: int) -> Float[np.ndarray, "#l #k"]:
        return np.full((1, 1), tokens, np.float64)
