"""Random admission at a given rate: what a method's choice of tokens is worth is its distance from this."""

from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from kvjax.errors import UserError, real_number
from kvjax.policies.base import Admission, Keep, Number
from kvjax.policies.chance import no_text, text_hash, uniform
from kvjax.policies.numbers import head_table, is_placed, whole_array
from kvjax.policies.views import Shape, Step
from kvjax.struct import assign, static, struct


@struct
class Random(Admission):
    """A token is admitted with the probability of its kv head: a hash of layer, head and the text up to the token.

    Its state is the hash of the text so far. Sequences that begin alike are treated alike up to where they part.
    """

    ratio: float | None = static(default=None)
    """The same rate for every head, instead of `rates`, and then kept there."""
    rates: Any = None
    """By layer and kv head, such as another policy was measured to have."""
    seed: Number = 0
    """Of the draws."""
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
        return np.asarray(self.rates, np.float64) * tokens
