"""Random eviction: what a method's choice is worth is its distance from this."""

from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.errors import whole_number
from kvjax.mesh import put
from kvjax.policies.admission.random import uniform
from kvjax.policies.eviction.method import Method
from kvjax.policies.eviction.unobserved import Unobserved
from kvjax.step import Stored
from kvjax.struct import struct

TURN = 0x1E3779B1
"""An odd number that puts the places of one number of tokens far from those of another."""


@struct
class RandomScore(Unobserved):
    """A hash of layer, head, place and how many tokens there are: at each compaction everyone has the same chance."""

    seed: Int[Array, "*l"]

    def score(self, state: tuple[()], stored: Stored) -> Float[Array, "b k s"]:
        turn = stored.place + stored.seen[:, None, None] * TURN

        def drawn(head, place):
            return uniform(self.seed, stored.layer, head[None], place)[:, 0]

        return jax.vmap(drawn, (0, 1), 1)(stored.head, turn)


def random(*, model: Any, seed: int = 0) -> Method:
    seed = whole_number("random_eviction", "seed", seed, 0)
    return Method(RandomScore(put(np.full(model.config.num_layers, seed, np.int32))))
