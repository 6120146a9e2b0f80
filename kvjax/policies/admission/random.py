"""Random admission at a given rate: what a method's choice of tokens is worth is its distance from this."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from kvjax.errors import UserError, real_number, whole_number
from kvjax.policies.chance import no_text, text_hash, uniform
from kvjax.policies.interfaces import Admission, Keep, Number
from kvjax.policies.policy import Policy, head_table
from kvjax.step import Step
from kvjax.struct import struct


@struct
class Random(Admission):
    """A token is admitted with probability `rate` of its kv head: a hash of layer, head and the text up to the token.

    Its state is the hash of the text so far. Sequences that begin alike are treated alike up to where they part.
    """

    rate: Float[Number, "... k"]
    seed: Int[Number, "..."]

    def init(self, batch: int, heads: int) -> UInt32[Array, " b"]:
        return no_text(batch)

    def score(
        self, state: UInt32[Array, " b"], step: Step, seen: Int[Array, " b"], valid: Int[Array, " b"]
    ) -> tuple[UInt32[Array, " b"], Float[Array, "b k t"], int]:
        text = text_hash(state, step)
        drawn = uniform(self.seed, step.layer, step.head[:, None], text[:, None])
        return text[:, -1], self.rate[:, None] - drawn, 0

    def keep(self) -> Keep:
        return Keep(jnp.float32(np.finfo(np.float32).tiny))

    def admitted(self, tokens: int) -> Float[np.ndarray, "#l #k"]:
        return np.asarray(self.rate, np.float64) * tokens


def random(
    *,
    window: int,
    ratio: float | None = None,
    rates: Float[np.ndarray, "l k"] | None = None,
    seed: int = 0,
    layers: int | None = None,
    kv_heads: int | None = None,
) -> Policy:
    """Random admission: the same `ratio` for every head, or `rates` by layer and kv head (such as another policy was
    measured to have), checked against `layers` and `kv_heads` where they are given."""
    if (ratio is None) == (rates is None):
        raise UserError("random: give either ratio (one number) or rates (layers × kv heads)")
    if rates is None:
        table = np.array([[real_number("random", "ratio", ratio, 0.0, 1.0)]])
    else:
        table = head_table("random", "rates", rates, layers, kv_heads)
    seed = whole_number("random", "seed", seed, 0)
    return Policy(
        Random(table.astype(np.float32), np.array(seed, np.int32)),
        name="random",
        window=whole_number("random", "window", window),
    )
