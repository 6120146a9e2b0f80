"""An admission for tests that retains every third token of each head, counted from where the head begins."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from kvjax.policies.base import Admission, Keep, Number
from kvjax.policies.policy import Policy
from kvjax.struct import struct


@struct
class Counting(Admission):
    """An admission whose state begins with numbers of its own: `start` of each head, plus `more` for all heads."""

    start: Number
    more: Number

    def init(self, shape):
        return jnp.broadcast_to(self.start + self.more, (shape.batch, shape.kv_heads))

    def score(self, state, step, seen, valid):
        count = state[..., None] + jnp.arange(step.k.shape[2])
        return state + valid[:, None], (count % 3 == 0).astype(jnp.float32), 0

    def keep(self):
        return Keep(jnp.float32(1))


START = np.arange(12, dtype=np.int32).reshape(3, 4) ** 2


def counting(*, window, start: Any = START, more: Any = 2):
    return Policy(Counting(start, more), name="counting", window=window)


def admitted(tokens, *, window) -> Int[np.ndarray, "l k"]:
    """Return how many of a sequence's tokens are retained entries by the admission's definition."""
    left = np.arange(tokens - window + 1)
    return ((START[..., None] + 2 + left) % 3 == 0).sum(-1)
