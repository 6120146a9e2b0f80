"""Products with a layer's matrices, in floats or in 8 bits, alone or in the stack of all layers'."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import reshard
from jaxtyping import Array, Float, Float32, Int, Shaped

from kvjax.mesh import P, names_in
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


def product(
    x: Float[Array, "b t d"], matrix: Matrix, whole: P, spec: P, index: Index
) -> Float32[Array, "b t f"]:
    """Return x · weight (+ bias), with sums in float32, split as in `spec`. The weight is read split as in `whole`."""
    y: Array
    if index is None and matrix.scale is None:
        y = multiply(x, gathered_for(x, matrix.weight, whole), "btd,df->btf", spec)
    else:
        y = _on_shards(x, matrix._replace(weight=reshard(matrix.weight, whole)), spec, index)
    return y if matrix.bias is None else y + matrix.bias


def gathered_for(x: Float[Array, "b t d"], weight: Float[Array, "..."], whole: P) -> Float[Array, "..."]:
    """Return a weight split as in `whole`, to multiply `x` or parts of it. On the way back, what the products add to
    its gradient stays on each device; then it is summed over the devices once, in float32, and each gets what it stores
    of the weight."""
    axes = names_in(*jax.typeof(x).sharding.spec[:2])
    stored, dtype = _unreduced(weight), weight.dtype

    @jax.custom_vjp
    def gather(weight):
        return reshard(weight, P(*whole, reduced=frozenset(axes)))

    def backward(_, gradient):
        return (reshard(gradient.astype(jnp.float32), stored).astype(dtype),)

    gather.defvjp(lambda weight: (gather(weight), None), backward)
    return gather(weight)


def _unreduced(x: Array) -> P:
    """Return the sharding of the gradient of `x` while each device has its own summand of it."""
    spec = jax.typeof(x).sharding.spec
    return P(*spec.partitions, unreduced=spec.reduced)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def multiply(
    x: Float[Array, "b t d"], weight: Float[Array, "..."], equation: str, spec: P
) -> Float32[Array, "b t f"]:
    """Return an einsum of activations with a weight (`gathered_for`), with sums in float32, split as in `spec`.

    Its gradients are products in x's dtype, too: by itself jax would widen one operand to float32, which GPUs multiply
    at half the speed of bfloat16.
    """
    return jnp.einsum(equation, x, weight, preferred_element_type=jnp.float32, out_sharding=spec)


def _forward(x, weight, equation, spec):
    return multiply(x, weight, equation, spec), (x, weight)


def _backward(equation, spec, saved, gradient):
    inputs, result = equation.split("->")
    (left, right), gradient = inputs.split(","), gradient.astype(saved[0].dtype)

    def of(equation, operand, own):
        product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        return product(equation, gradient, operand, out_sharding=_unreduced(own)).astype(own.dtype)

    x, weight = saved
    return of(f"{result},{right}->{left}", weight, x), of(f"{result},{left}->{right}", x, weight)


multiply.defvjp(_forward, _backward)


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
