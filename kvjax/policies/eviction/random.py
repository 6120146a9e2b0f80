"""Random eviction: what a method's choice is worth is its distance from this."""

import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from kvjax.errors import whole_number
from kvjax.policies.chance import no_text, text_hash, uniform
from kvjax.policies.eviction.method import Method
from kvjax.policies.interfaces import Eviction, Number
from kvjax.step import Step, Stored
from kvjax.struct import struct


@struct
class RandomScore(Eviction):
    """A hash of layer, head, place and the text so far: at each compaction everyone has the same chance."""

    seed: Int[Number, "..."]

    def init(self, batch: int, heads: int) -> UInt32[Array, " b"]:
        return no_text(batch)

    def observe(
        self, state: UInt32[Array, " b"], step: Step, seen: Int[Array, " b"], valid: Int[Array, " b"]
    ) -> UInt32[Array, " b"]:
        return text_hash(state, step)[:, -1]

    def score(self, state: UInt32[Array, " b"], stored: Stored) -> Float[Array, "b k s"]:
        return uniform(self.seed, stored.layer, stored.head[:, None], state[:, None, None], stored.place)


def random(*, seed: int = 0) -> Method:
    return Method(RandomScore(np.array(whole_number("random_eviction", "seed", seed, 0), np.int32)))
