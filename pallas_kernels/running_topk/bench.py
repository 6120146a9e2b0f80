"""Benchmark of `running_topk` against the time of a layer's dense attention."""

import functools
from typing import Any

import jax

from pallas_kernels.choose import target
from pallas_kernels.running_topk import ranks, running_topk
from pallas_kernels.timing import Check, Line, Part, Setting, program, run, tokens
from pallas_kernels.vertical_slash.bench import arrays, dense

SHARE = 20
"""The target is the time of a layer's dense attention divided by this."""


def usual() -> tuple[str, ...]:
    kernel = target().platform
    return ("counts", "xla") if kernel == "cpu" else (kernel, "counts", "xla")


def lines(setting: Setting, key: jax.Array, s: int, implementations: tuple[str, ...]) -> list[Line]:
    """Return a line for each implementation. A quarter of the keys stay."""
    rank = ranks(jax.random.normal(key, (1, setting.k, s)))
    name, attention = dense()
    bound = f"1/{SHARE} of {name} attention"
    layer = program(attention, tuple(x.swapaxes(1, 2) for x in arrays(setting, key, s)), rank.size)
    layer = layer._replace(inner=SHARE)
    ours = {}
    for x in implementations:
        call = functools.partial(running_topk, k=s // 4, window=setting.window, implementation=x)
        ours[x] = program(call, (rank,), rank.size)
    return [Line(tokens(s), x, candidate, {bound: layer}, "Gkey/s", bound) for x, candidate in ours.items()]


def checks(key: jax.Array, dtype: Any) -> list[Check]:
    def call(implementation, rank):
        return running_topk(rank, k=60, window=37, implementation=implementation)

    return [Check("tau and end", call, (ranks(jax.random.normal(key, (2, 2, 270))),))]


def main(arguments: list[str] | None = None) -> list[dict]:
    parts = [Part("running_topk", lines, (8192, 32768, 131072), (8192,))]
    return run("running_topk", usual, checks, parts, arguments)


if __name__ == "__main__":
    main()
