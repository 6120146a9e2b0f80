"""Benchmark of `attention_mass`: KVPOP's target, and SnapKV's attention of the last queries."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention_mass import attention_mass
from pallas_kernels.choose import BY_PLATFORM, target
from pallas_kernels.timing import Check, Line, Part, Setting, program, random, run, tokens

OBSERVED = 32
"""The number of last queries that SnapKV observes."""


def usual() -> tuple[str, ...]:
    return (BY_PLATFORM[target().platform],)


def dense(q, k, lse, *, over, offset):
    """Compute the mass with all probabilities at once. If `lse` is None, it is computed over the causal keys."""
    b, n, t, h = q.shape
    heads, s = k.shape[1:3]
    grouped = q.reshape(b, heads, n // heads, t, h)
    x = jnp.einsum("bkgth,bksh->bkgts", grouped, k, preferred_element_type=jnp.float32) * h**-0.5
    distance = jnp.arange(t)[:, None] + s - t - jnp.arange(s)
    if lse is None:
        lse = jax.nn.logsumexp(jnp.where(distance >= 0, x, -jnp.inf), -1)
    x = jnp.where(distance >= offset, x - lse.reshape(b, heads, -1, t)[..., None], -jnp.inf)
    return jax.nn.logsumexp(x, 3).max(2) if over == "logsumexp" else jnp.exp(x).sum(3).mean(2)


def benchmark_lines(
    setting: Setting, args, implementations, work, unit, bound, label, inner, **options
) -> list[Line]:
    """Return a line for each implementation; `args` are q, k and lse."""
    q, k, _ = args
    rivals = {}
    if setting.n * q.shape[2] * k.shape[2] * 4 <= setting.logits:
        rival = functools.partial(dense, over=options["over"], offset=options["offset"])
        rivals["XLA, dense"] = program(rival, args, work, inner)

    def call(implementation, q, k, lse):
        return attention_mass(q, k, lse=lse, implementation=implementation, **options)

    shape = f"{tokens(k.shape[2])}, {label}"
    return [
        Line(shape, x, program(functools.partial(call, x), args, work, inner), rivals, unit, bound)
        for x in implementations
    ]


def kvpop(setting: Setting, key: jax.Array, s: int, implementations: tuple[str, ...]) -> list[Line]:
    """Time the mass of every key by all queries beyond its window, given their log-sum-exp: one product per pair."""
    q, k = (random(key, (1, x, s, setting.h), setting.dtype) for x in (setting.n, setting.k))
    lse = jnp.broadcast_to(jnp.log(jnp.arange(1.0, s + 1)), (1, setting.n, s))
    counting = max(s - setting.window, 0)
    work = 2.0 * setting.h * setting.n * counting * (counting + 1) / 2
    options = {"over": "logsumexp", "group": "max", "offset": setting.window, "inner": 1}
    units = "TFLOP/s", "matrix product", "KVPOP's target"
    return benchmark_lines(setting, (q, k, lse), implementations, work, *units, **options)


def observed(setting: Setting, key: jax.Array, s: int, implementations: tuple[str, ...]) -> list[Line]:
    """Time a few queries without their log-sum-exp. The keys are read twice, but the bound counts them once."""
    sizes = (setting.n, OBSERVED), (setting.k, s)
    q, k = (random(key, (1, heads, t, setting.h), setting.dtype) for heads, t in sizes)
    options = {"over": "sum", "group": "mean", "offset": 0, "inner": setting.inner}
    units = "TB/s", "device copy", f"the last {OBSERVED} queries"
    return benchmark_lines(setting, (q, k, None), implementations, k.nbytes, *units, **options)


def checks(key: jax.Array, dtype: Any) -> list[Check]:
    """Check the last 200 queries of 270."""

    def call(implementation, q, k):
        mass = functools.partial(attention_mass, q, k, offset=0, implementation=implementation)
        return (
            mass(over="logsumexp", group="max"),
            mass(over="sum", group="mean"),
            mass(over="max", group="max"),
        )

    q, k = (random(key, (1, heads, t, 64), dtype) for heads, t in ((4, 200), (2, 270)))
    return [Check("mass", call, (q, k))]


def main(arguments: list[str] | None = None) -> list[dict]:
    parts = [
        Part("attention_mass", kvpop, (8192, 32768), (4096,)),
        Part("attention_mass", observed, (32768, 131072), (16384,)),
    ]
    return run("attention_mass", usual, checks, parts, arguments)


if __name__ == "__main__":
    main()
