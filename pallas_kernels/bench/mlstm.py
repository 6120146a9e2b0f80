"""`mlstm`, as KVPOP's scorer runs it, forward and with the gradient: the chunkwise form against all pairs at once."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.bench.job import Job, Line, Task, random, tokens
from pallas_kernels.bench.setting import Setting
from pallas_kernels.bench.timing import program
from pallas_kernels.mlstm import mlstm
from pallas_kernels.mlstm.xla import CHUNK

PAIRS = "all pairs"


def jobs(setting: Setting, key: jax.Array) -> list[Task]:
    return [
        Task(op, tokens(s), functools.partial(make, setting, key, s))
        for s in setting.mlstm
        for op, make in (("mlstm", forward), ("mlstm, backward", backward))
    ]


def streams(key: jax.Array, heads: int, s: int, d: int) -> tuple[jax.Array, ...]:
    """Features that are not negative, values half as wide, and gates that forget within a few hundred tokens."""
    wide = 1, heads, s, d
    q, k, v = (random(x, wide, jnp.float32) for x in jax.random.split(key, 3))
    log_i, log_f = random(key, (2, *wide[:3]), jnp.float32)
    return jnp.abs(q), jnp.abs(k), v[..., : d // 2], log_i, -jnp.abs(log_f) / 100


def _job(setting: Setting, key: jax.Array, s: int, call, products: int, what: str) -> Job:
    """`products`: how often each of the forward pass's is made."""
    given = streams(key, setting.k, s, setting.h)
    e = setting.h // 2
    work = products * 2.0 * setting.k * s * (CHUNK * (setting.h + e) + 2 * setting.h * e)
    name = setting.implementation
    candidates = {name: program(functools.partial(call, name), given, work)}
    if setting.k * s**2 * 4 <= setting.logits:
        candidates[PAIRS] = program(functools.partial(call, "reference"), given, work)
    rivals = {x: x for x in candidates if x != name}
    return Job(candidates, [Line(f"{tokens(s)}{what}", name, rivals, "TFLOP/s", "matrix product")])


def forward(setting: Setting, key: jax.Array, s: int) -> Job:
    def call(implementation, *given):
        return mlstm(*given, implementation=implementation)

    return _job(setting, key, s, call, 1, "")


def backward(setting: Setting, key: jax.Array, s: int) -> Job:
    """The forward pass's products, and two for each of them."""

    def call(implementation, *given):
        def total(*given):
            return mlstm(*given, implementation=implementation)[0].sum()

        return jax.grad(total, tuple(range(len(given))))(*given)

    return _job(setting, key, s, call, 3, ", forward and backward")
