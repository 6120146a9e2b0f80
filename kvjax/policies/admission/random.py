"""Random admission at a given rate: what a method's choice of tokens is worth is its distance from this."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from kvjax.errors import UserError, real_number, whole_number
from kvjax.mesh import put
from kvjax.policies.interfaces import Keep
from kvjax.policies.policy import Policy, head_table
from kvjax.step import Step
from kvjax.struct import struct


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A bijective 32-bit finaliser with full avalanche (MurmurHash3's)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def uniform(
    seed: Int[Array, ""], layer: Int[Array, ""], head: Int[Array, " k"], position: Int[Array, "b t"]
) -> Float[Array, "b k t"]:
    """Uniform numbers in [0, 1) that are a hash of their place, so they depend on no shape, batch or mesh."""
    x = _mix(seed.astype(jnp.uint32) + jnp.uint32(0x9E3779B9))
    x = _mix(x ^ layer.astype(jnp.uint32))
    x = _mix(x ^ head.astype(jnp.uint32))[:, None]
    x = _mix(x ^ position.astype(jnp.uint32)[:, None, :])
    return (x >> 8).astype(jnp.float32) * jnp.float32(2**-24)


@struct
class Random:
    """A token is admitted with probability `rate` of its kv head."""

    rate: Float[Array, "*l k"]
    seed: Int[Array, "*l"]

    def init(self, batch: int) -> tuple[()]:
        return ()

    def score(self, state: tuple[()], step: Step) -> tuple[tuple[()], Float[Array, "b k t"], int]:
        drawn = uniform(self.seed, step.layer, step.head, step.position)
        return state, self.rate[:, None] - drawn, 0

    def keep(self) -> Keep:
        return Keep(jnp.float32(np.finfo(np.float32).tiny))

    def admitted(self, tokens: int) -> Float[np.ndarray, "#l #k"]:
        return np.asarray(self.rate, np.float64) * tokens


def random(
    *,
    layers: int,
    kv_heads: int,
    window: int,
    ratio: float | None = None,
    rates: Float[np.ndarray, "l k"] | None = None,
    seed: int = 0,
) -> Policy:
    """Random admission: the same `ratio` for every head, or `rates` by layer and kv head (such as another policy was
    measured to have)."""
    if (ratio is None) == (rates is None):
        raise UserError("random: give either ratio (one number) or rates (layers × kv heads)")
    layers, kv_heads = (
        whole_number("random", name, size) for name, size in (("layers", layers), ("kv_heads", kv_heads))
    )
    if rates is None:
        table = np.full((layers, kv_heads), real_number("random", "ratio", ratio, 0.0, 1.0))
    else:
        table = head_table("random", "rates", rates, layers, kv_heads)
    seeds = np.full(layers, whole_number("random", "seed", seed, 0), np.int32)
    return Policy(
        Random(put(table.astype(np.float32), None, "tensor"), put(seeds)),
        name="random",
        window=whole_number("random", "window", window),
    )
