"""Products with a layer's matrices, in floats or in 8 bits, alone or in the stack of all layers'."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Shaped

from kvjax.mesh import P
from pallas_kernels.stack_product import stack_product

Index = Int[Array, ""] | None
"""The index of a layer whose matrices are given as the stack of all layers'; None if they are given alone."""


class Matrix(NamedTuple):
    """A matrix with what goes with it, or those of all layers, with a leading layer axis."""

    weight: Shaped[Array, "... inputs outputs"]
    """The weights, in floats or in 8 bits."""
    scale: Float32[Array, "... blocks outputs"] | None
    """The scales of weights in 8 bits."""
    bias: Float[Array, "... outputs"] | None
    """The numbers that are added to products. In a stack only those of experts are of all layers."""


def product(x: Float[Array, "b t d"], matrix: Matrix, spec: P, index: Index) -> Float32[Array, "b t f"]:
    """Return x · weight (+ bias), with sums in float32, split as in `spec`."""
    if index is None and matrix.scale is None:
        y = jnp.einsum("btd,df->btf", x, matrix.weight, preferred_element_type=jnp.float32, out_sharding=spec)
    else:
        y = _on_shards(x, matrix, spec, index)
    return y if matrix.bias is None else y + matrix.bias


def _on_shards(x: Float[Array, "b t d"], matrix: Matrix, spec: P, index: Index) -> Float32[Array, "b t f"]:
    """Return the product that each device makes with its own part, summed over the devices that share the inputs."""
    inputs = jax.typeof(matrix.weight).sharding.spec[-2]

    def local(x, weight, scale, index):
        rows = x.reshape(-1, x.shape[-1])
        if index is None:
            y = stack_product(rows, weight[None], jnp.int32(0), scale[None], implementation="xla")
        else:
            y = stack_product(rows, weight, index, scale)
        y = y.reshape(*x.shape[:2], -1)
        return y if inputs is None else jax.lax.psum(y, inputs)

    return jax.shard_map(local, out_specs=spec)(x, matrix.weight, matrix.scale, index)
