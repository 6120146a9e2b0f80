"""Times of several programs on the same inputs: compiled and warm, taken in turns, of which the median counts.

A timing is of a batch of calls that are sent one after another and awaited together; short ops also run several times
inside one program. So neither includes the time that starting a program takes, as long as that is shorter.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Run = Callable[[int], None]
"""Runs so many times and waits."""


class Candidate(NamedTuple):
    """`prepare()` compiles; a run of what it gives is `inner` calls, each doing `work` (FLOPs or bytes)."""

    prepare: Callable[[], Run]
    work: int | float
    inner: int = 1


class Failed(NamedTuple):
    """Why there is no time."""

    reason: str
    """In a line."""


def program(call: Callable, args: Any, work: int | float, inner: int = 1) -> Candidate:
    """`call(*args)` in JAX."""

    return Candidate(lambda: runs(_step(call, inner), args), work, inner)


@functools.cache
def _step(call, inner):
    """Kept, so that the same call of other arrays is not compiled again."""

    def repeated(*args):
        def once(_, out):
            # so that nothing of a call is known before the call before is done
            args_again, _ = lax.optimization_barrier((args, out))
            return call(*args_again)

        shapes = jax.eval_shape(call, *args)
        return lax.fori_loop(0, inner, once, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))

    return jax.jit(call if inner == 1 else repeated)


def runs(step: Callable, args: Any) -> Run:
    def run(n):
        out = None
        for _ in range(n):
            out = step(*args)
        jax.block_until_ready(out)

    return run


def measure(
    candidates: Mapping[str, Candidate], *, batch: float, seconds: float
) -> dict[str, float | Failed]:
    """Seconds that a call of each takes."""
    ready: dict[str, tuple[Run, int]] = {}
    results: dict[str, float | Failed] = {}
    once = 0.0
    for name, candidate in candidates.items():
        try:
            run = candidate.prepare()
            run(1)
            first = _time(run, 1)
        except Exception as error:
            results[name] = Failed(reason(error))
            continue
        n = max(1, math.ceil(batch / first))
        ready[name] = run, n
        once += n * first
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(min(max(3, int(seconds / once)), 15) if ready else 0):
        for name, (run, n) in ready.items():
            times[name].append(_time(run, n) / n / candidates[name].inner)
    return results | {name: statistics.median(x) for name, x in times.items()}


def _time(run: Run, n: int) -> float:
    start = time.perf_counter()
    run(n)
    return time.perf_counter() - start


def reason(error: Exception) -> str:
    """One line."""
    text = str(error).strip() or type(error).__name__
    out_of_memory = isinstance(error, MemoryError) or any(
        sign in text.lower() for sign in ("resource_exhausted", "out of memory", "outofmemory")
    )
    return "out of memory" if out_of_memory else text.splitlines()[0][:160]
