"""Random eviction: what a method's choice is worth is its distance from this."""

from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from kvjax.errors import whole_number
from kvjax.mesh import put
from kvjax.policies.chance import no_text, text_hash, uniform
from kvjax.policies.eviction.method import Method
from kvjax.policies.interfaces import Eviction
from kvjax.step import Step, Stored
from kvjax.struct import struct


@struct
class RandomScore(Eviction):
    """A hash of layer, head, place and the text so far: at each compaction everyone has the same chance."""

    seed: Int[Array, "*l"]

    def init(self, batch: int, heads: int) -> UInt32[Array, " b"]:
        return no_text(batch)

    def observe(
        self, state: UInt32[Array, " b"], step: Step, seen: Int[Array, " b"], valid: Int[Array, " b"]
    ) -> UInt32[Array, " b"]:
        return text_hash(state, step)[:, -1]

    def score(self, state: UInt32[Array, " b"], stored: Stored) -> Float[Array, "b k s"]:
        return uniform(self.seed, stored.layer, stored.head[:, None], state[:, None, None], stored.place)


def random(*, model: Any, seed: int = 0) -> Method:
    seed = whole_number("random_eviction", "seed", seed, 0)
    return Method(RandomScore(put(np.full(model.config.num_layers, seed, np.int32))))
