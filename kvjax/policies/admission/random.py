"""Random admission at a given rate, the control that a method's choice of tokens is compared with."""

from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from kvjax.errors import UserError, real_number
from kvjax.mesh import on_host
from kvjax.policies.base import Admission, Keep, Number
from kvjax.policies.chance import no_text, text_hash, uniform
from kvjax.policies.numbers import head_table, is_placed, whole_array
from kvjax.policies.views import Shape, Step
from kvjax.struct import assign, static, struct


@struct
class Random(Admission):
    """Admission of a token with the probability of its kv head, by a hash of layer, head and the text up to the token.

    The state is the hash of the text so far. Sequences with a common beginning are treated alike up to its end.
    """

    ratio: float | None = static(default=None)
    """The rate of every head, given instead of `rates` and stored there."""
    rates: Any = None
    """The rates by layer and kv head, such as those measured for another policy."""
    seed: Number = 0
    """The seed of the random numbers."""
    name = "random"

    def __post_init__(self):
        if is_placed(self.rates):
            return
        if (self.ratio is None) == (self.rates is None):
            raise UserError("random: give either ratio (one number) or rates (layers × kv heads)")
        if self.rates is None:
            table = np.array([[real_number(self.name, "ratio", self.ratio, 0.0, 1.0)]])
        else:
            table = head_table(self.name, "rates", self.rates)
        seed = whole_array(self.name, "seed", self.seed, 0)
        assign(self, ratio=None, rates=table.astype(np.float32), seed=seed)

    def init(self, shape: Shape) -> UInt32[Array, " b"]:
        return no_text(shape.batch)

    def score(
        self, state: UInt32[Array, " b"], step: Step, seen: Int[Array, " b"], valid: Int[Array, " b"]
    ) -> tuple[UInt32[Array, " b"], Float[Array, "b k t"], int]:
        text = text_hash(state, step)
        drawn = uniform(self.seed, step.layer, step.head[:, None], text[:, None])
        return text[:, -1], self.rates[:, None] - drawn, 0

    def keep(self) -> Keep:
        return Keep(float(np.finfo(np.float32).tiny))

    def admitted(self, tokens: int) -> Float[np.ndarray, "#l #k"]:
        return on_host(self.rates).astype(np.float64) * tokens
