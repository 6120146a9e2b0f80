"""Benchmark of `mlstm` as in KVPOP's scorer, forward and backward: the chunkwise form against all pairs at once."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.choose import target
from pallas_kernels.mlstm import mlstm
from pallas_kernels.mlstm.api import FASTEST
from pallas_kernels.mlstm.xla import CHUNK
from pallas_kernels.timing import Check, Line, Part, Setting, program, random, run, tokens


def usual() -> tuple[str, ...]:
    return (FASTEST[target().platform],)


def streams(key: jax.Array, b: int, heads: int, s: int, d: int) -> tuple[jax.Array, ...]:
    """Sample non-negative queries and keys, values half as wide, and gates that forget within a few hundred tokens."""
    keys = jax.random.split(key, 5)
    q, k, v = (random(x, (b, heads, s, d), jnp.float32) for x in keys[:3])
    log_i, log_f = (random(x, (b, heads, s), jnp.float32) for x in keys[3:])
    return jnp.abs(q), jnp.abs(k), v[..., : d // 2], log_i, -jnp.abs(log_f) / 100


def forward(implementation, *args):
    return mlstm(*args, implementation=implementation)


def gradient(implementation, *args):
    def total(*args):
        return mlstm(*args, implementation=implementation)[0].sum()

    return jax.grad(total, tuple(range(len(args))))(*args)


def lines(call, products, label, setting: Setting, key: jax.Array, s: int, implementations) -> list[Line]:
    """Return a line for each implementation. `products` counts the products per product of the forward pass."""
    args = streams(key, 1, setting.k, s, setting.h)
    e = setting.h // 2
    work = products * 2.0 * setting.k * s * (CHUNK * (setting.h + e) + 2 * setting.h * e)
    rivals = {}
    if setting.k * s**2 * 4 <= setting.logits:
        rivals["all pairs"] = program(functools.partial(call, "reference"), args, work)
    ours = {x: program(functools.partial(call, x), args, work) for x in implementations}
    shape = f"{tokens(s)}, {label}"
    return [Line(shape, x, candidate, rivals, "TFLOP/s", "matrix product") for x, candidate in ours.items()]


def checks(key: jax.Array, dtype: Any) -> list[Check]:
    args = streams(key, 2, 2, 270, 64)
    return [Check("forward", forward, args), Check("gradient", gradient, args, gradient=True)]


def main(arguments: list[str] | None = None) -> list[dict]:
    contexts = (8192, 32768), (4096, 8192, 16384)
    parts = [
        Part("mlstm", functools.partial(lines, forward, 1, "forward"), *contexts),
        # The backward pass has two products for each product of the forward pass.
        Part("mlstm", functools.partial(lines, gradient, 3, "forward and backward"), *contexts),
    ]
    return run("mlstm", usual, checks, parts, arguments)


if __name__ == "__main__":
    main()
