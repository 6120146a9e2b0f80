"""Random eviction, the control that a method's choice of entries is compared with."""

from jaxtyping import Array, Float, Int, UInt32

from kvjax.policies.base import Eviction, Number, Observer
from kvjax.policies.chance import no_text, text_hash, uniform
from kvjax.policies.numbers import whole_array
from kvjax.policies.views import Shape, Step, Stored
from kvjax.struct import assign, struct


@struct
class RandomEviction(Observer, Eviction):
    """A random score, a hash of layer, head, place and the text so far: at each compaction every entry has the same
    chance."""

    seed: Number = 0
    """The seed of the random numbers."""
    name = "random_eviction"

    def __post_init__(self):
        assign(self, seed=whole_array(self.name, "seed", self.seed, 0))

    def init(self, shape: Shape) -> UInt32[Array, " b"]:
        return no_text(shape.batch)

    def observe(
        self, state: UInt32[Array, " b"], step: Step, seen: Int[Array, " b"], valid: Int[Array, " b"]
    ) -> UInt32[Array, " b"]:
        return text_hash(state, step)[:, -1]

    def score(self, state: UInt32[Array, " b"], stored: Stored) -> Float[Array, "b k s"]:
        return uniform(self.seed, stored.layer, stored.head[:, None], state[:, None, None], stored.place)
