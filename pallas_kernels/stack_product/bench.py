"""Benchmark of `stack_product`: the products of a layer of Llama-3.1-8B in decoding, bound by reading the weights."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.choose import target
from pallas_kernels.stack_product import stack_product
from pallas_kernels.stack_product.api import FASTEST
from pallas_kernels.timing import Check, Line, Part, Setting, program, random, run

PRODUCTS = {
    "q, k and v": (4096, 6144),
    "o": (4096, 4096),
    "gate and up": (4096, 28672),
    "down": (14336, 4096),
}
"""The number of inputs and outputs of each product."""
LAYERS = 2


def usual() -> tuple[str, ...]:
    return (FASTEST[target().platform],)


def lines(setting: Setting, key: jax.Array, rows: int, implementations: tuple[str, ...]) -> list[Line]:
    """Return a line for each product. The rival is XLA's product with the weights in a separate array."""
    shrink = 1 if setting.dtype == jnp.bfloat16 else 8
    result = []
    for name, (inputs, outputs) in PRODUCTS.items():
        x = random(key, (rows, inputs // shrink), setting.dtype)
        stack = random(key, (LAYERS, inputs // shrink, outputs // shrink), setting.dtype)
        work, inner = stack[0].nbytes, setting.inner
        product = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
        rival = program(product, (x, stack[1]), work, inner)
        for implementation in implementations:
            call = functools.partial(stack_product, implementation=implementation)
            ours = program(call, (x, stack, jnp.int32(1)), work, inner)
            shape = f"{name}, {rows} rows"
            result.append(
                Line(shape, implementation, ours, {"XLA, weights alone": rival}, "TB/s", "device copy")
            )
    return result


def checks(key: jax.Array, dtype: Any) -> list[Check]:
    """Check a size that no tile divides."""

    def call(implementation, x, stack):
        return stack_product(x, stack, jnp.int32(2), implementation=implementation)

    return [Check("product", call, (random(key, (5, 1000), dtype), random(key, (3, 1000, 300), dtype)))]


def main(arguments: list[str] | None = None) -> list[dict]:
    return run("stack_product", usual, checks, [Part("stack_product", lines, (1, 16), (1,))], arguments)


if __name__ == "__main__":
    main()
