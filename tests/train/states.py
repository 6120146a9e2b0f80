"""A training state of several kinds of leaves, on a mesh."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from kvjax.struct import struct


@struct
class State:
    weights: jax.Array
    moments: dict
    count: jax.Array


def make(size=16, seed=0.0):
    weights = jnp.arange(size * 8, dtype=jnp.float32, out_sharding=P()).reshape(size, 8) + seed
    weights = jax.sharding.reshard(weights, P("tensor", "fsdp"))
    return State(weights, {"mu": weights * 2, "nu": weights.astype(jnp.bfloat16)}, jnp.int32(3))


def made(mesh, **changes):
    with jax.set_mesh(mesh):
        return jax.jit(lambda: make(**changes))()
