"""Products with the matrices of a layer, in floats or in 8 bits, alone or in a stack of all layers."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import reshard
from jaxtyping import Array, Float, Float32, Int, Shaped

from kvjax.mesh import P, names_in
from pallas_kernels.stack_product import stack_product

Index = Int[Array, ""] | None
"""The index of the layer if matrices are stacks over all layers; None if they are one layer's."""


class Matrix(NamedTuple):
    """A matrix with its scales and biases, of one layer or, with a leading layer axis, of all layers."""

    weight: Shaped[Array, "... inputs outputs"]
    """The weights, in floats or in 8 bits."""
    scale: Float32[Array, "... blocks outputs"] | None
    """The scales of 8-bit weights."""
    bias: Float[Array, "... outputs"] | None
    """The numbers added to products. Only the biases of experts are ever stacked over all layers."""


def product(
    x: Float[Array, "b t d"], matrix: Matrix, weight_spec: P, spec: P, index: Index
) -> Float32[Array, "b t f"]:
    """Return x · weight (+ bias), with sums in float32, split as in `spec`. The weight is read in the sharding
    `weight_spec`."""
    y: Array
    if index is None and matrix.scale is None:
        y = multiply(x, gathered_for(x, matrix.weight, weight_spec), "btd,df->btf", spec)
    else:
        y = _on_shards(x, matrix._replace(weight=reshard(matrix.weight, weight_spec)), spec, index)
    return y if matrix.bias is None else y + matrix.bias


def gathered_for(x: Float[Array, "b t d"], weight: Float[Array, "..."], spec: P) -> Float[Array, "..."]:
    """Return a weight split as in `spec`, to multiply `x` or parts of it. In the backward pass each device accumulates
    its own summand of the gradient. These are then summed over the devices once, in float32, and each device gets the
    part for the weights that it stores."""
    axes = names_in(*jax.typeof(x).sharding.spec[:2])
    stored, dtype = _unreduced(weight), weight.dtype

    @jax.custom_vjp
    def gather(weight):
        return reshard(weight, P(*spec, reduced=frozenset(axes)))

    def backward(_, gradient):
        return (reshard(gradient.astype(jnp.float32), stored).astype(dtype),)

    gather.defvjp(lambda weight: (gather(weight), None), backward)
    return gather(weight)


def _unreduced(x: Array) -> P:
    """Return the sharding of the gradient of `x` before its summands are summed over devices."""
    spec = jax.typeof(x).sharding.spec
    return P(*spec.partitions, unreduced=spec.reduced)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def multiply(
    x: Float[Array, "b t d"], weight: Float[Array, "..."], equation: str, spec: P
) -> Float32[Array, "b t f"]:
    """Return an einsum of activations with a weight (`gathered_for`), with sums in float32, split as in `spec`.

    Its gradients are also products in the dtype of x. By default JAX would widen one operand to float32, which GPUs
    multiply at half the speed of bfloat16.
    """
    return jnp.einsum(equation, x, weight, preferred_element_type=jnp.float32, out_sharding=spec)


def _forward(x, weight, equation, spec):
    return multiply(x, weight, equation, spec), (x, weight)


def _backward(equation, spec, saved, gradient):
    inputs, result = equation.split("->")
    (left, right), gradient = inputs.split(","), gradient.astype(saved[0].dtype)

    def gradient_of(primal, equation, operand):
        product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        return product(equation, gradient, operand, out_sharding=_unreduced(primal)).astype(primal.dtype)

    x, weight = saved
    x_gradient = gradient_of(x, f"{result},{right}->{left}", weight)
    return x_gradient, gradient_of(weight, f"{result},{left}->{right}", x)


multiply.defvjp(_forward, _backward)


def _on_shards(x: Float[Array, "b t d"], matrix: Matrix, spec: P, index: Index) -> Float32[Array, "b t f"]:
    """Return the product, made by each device with its part of the matrix. Where inputs are split over devices, their
    partial products are summed."""
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
