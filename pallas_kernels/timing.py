"""The clock, command line and table that every op's `bench.py` shares.

Compiled and warm programs are timed in turns on the same inputs, and the median counts. One timing covers a batch of
calls that are dispatched one after another and awaited together. Short ops run several times inside one program, so
that the time to start a program is not measured.
"""

import argparse
import functools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Setting(NamedTuple):
    """The attention layer that is timed, and the settings of the timing. Sizes are in tokens, entries or bytes."""

    n: int
    k: int
    h: int
    dtype: Any
    batch: int
    inner: int
    """The runs of a short op inside one program."""
    copied: int
    """The bytes of the array whose copy bounds memory-bound ops."""
    matmul: int
    """The width of the matrices whose product bounds compute-bound ops."""
    logits: int
    """The most bytes of logits. A rival that would need more is left out."""
    seconds: float
    """The approximate time in seconds that the timings of one context take."""
    window: int = 256
    page: int = 64


ACCELERATOR = Setting(32, 8, 128, jnp.bfloat16, 16, 32, 1 << 32, 8192, 1 << 34, 3.0)
"""One layer of Llama-3.1-8B or Qwen3-4B."""
CPU = Setting(8, 2, 64, jnp.float32, 4, 1, 1 << 28, 1024, 1 << 30, 10.0)
"""One layer of a small model."""
BATCH = 0.02
"""The least seconds of one timing. Shorter programs are repeated."""
UNITS = {"TFLOP/s": 1e12, "TB/s": 1e12, "Gkey/s": 1e9}
COLUMNS = (
    *("op", "shape", "implementation", "ms", "rate", "unit", "bound", "bound by", "of the bound"),
    *("best rival", "its ms", "speed-up", "rivals"),
)
LIMITS = {jnp.dtype(jnp.float32): 1e-5, jnp.dtype(jnp.bfloat16): 1e-2}
"""Largest relative error of a result, by its dtype; integers are exact."""

Run = Callable[[int], None]
"""A function that runs a program a number of times and waits for it."""


class Candidate(NamedTuple):
    """A program to time. `prepare()` compiles it; a run is `inner` calls, each doing `work` (FLOPs, bytes or keys)."""

    prepare: Callable[[], Run]
    work: int | float
    inner: int = 1


class Line(NamedTuple):
    """A row of the table before timing. `bound` names the rate's bound: "device copy", "matrix product" or a rival."""

    shape: str
    implementation: str
    ours: Candidate
    rivals: dict[str, Candidate]
    unit: str
    bound: str


class Part(NamedTuple):
    """A part of a benchmark: `lines(setting, key, tokens, implementations)` and the contexts it usually gets."""

    name: str
    lines: Callable[[Setting, jax.Array, int, tuple[str, ...]], list[Line]]
    accelerator: tuple[int, ...]
    cpu: tuple[int, ...]


class Check(NamedTuple):
    """A check that `call(implementation, *args)` equals `call("reference", *args)` within `LIMITS`."""

    name: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    gradient: bool = False
    """True if errors are relative to the largest number, since a row of a gradient may be 0."""


def program(call: Callable, args: Any, work: int | float, inner: int = 1) -> Candidate:
    """Return the candidate that runs `call(*args)` in JAX."""
    return Candidate(lambda: runs(_step(call, inner), args), work, inner)


@functools.cache
def _step(call, inner):
    """Return the jitted call. It is cached, so that the same call with other arrays is not compiled again."""

    def repeated(*args):
        def once(_, out):
            # Keep a call from starting before the previous one has ended.
            args_again, _ = lax.optimization_barrier((args, out))
            return call(*args_again)

        shapes = jax.eval_shape(call, *args)
        return lax.fori_loop(0, inner, once, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))

    return jax.jit(call if inner == 1 else repeated)


def runs(step: Callable, args: Any) -> Run:
    """Return a function that runs `step(*args)` a number of times and waits."""

    def run(n):
        out = None
        for _ in range(n):
            out = step(*args)
        jax.block_until_ready(out)

    return run


def measure(candidates: Iterable[Candidate], seconds: float) -> dict[Candidate, float | str]:
    """Return the seconds of a call of each candidate, or one line that says why it was not timed."""
    ready: dict[Candidate, tuple[Run, int]] = {}
    failed: dict[Candidate, float | str] = {}
    round_seconds = 0.0
    for candidate in dict.fromkeys(candidates):
        try:
            run = candidate.prepare()
            run(1)
            first = _time(run, 1)
        except Exception as error:
            text = str(error).strip() or type(error).__name__
            out_of_memory = any(sign in text.lower() for sign in ("resource_exhausted", "out of memory"))
            failed[candidate] = "out of memory" if out_of_memory else text.splitlines()[0][:160]
            continue
        n = max(1, math.ceil(BATCH / first))
        ready[candidate] = run, n
        round_seconds += n * first
    times: dict[Candidate, list[float]] = {candidate: [] for candidate in ready}
    for _ in range(min(max(3, int(seconds / round_seconds)), 15) if ready else 0):
        for candidate, (run, n) in ready.items():
            times[candidate].append(_time(run, n) / n / candidate.inner)
    return failed | {candidate: statistics.median(x) for candidate, x in times.items()}


def _time(run: Run, n: int) -> float:
    start = time.perf_counter()
    run(n)
    return time.perf_counter() - start


def bounds(setting: Setting, key: jax.Array) -> dict[str, float]:
    """Measure this device: bytes per second that a copy reads and writes, and FLOPs per second of a large product."""
    source = random(key, (setting.copied // 4,), jnp.float32)
    x = random(key, (setting.matmul, setting.matmul), setting.dtype)
    candidates = {
        "device copy": program(jnp.copy, (source,), 2 * source.nbytes),
        "matrix product": program(jnp.matmul, (x, x), 2 * setting.matmul**3),
    }
    times = measure(candidates.values(), setting.seconds)
    return {name: x.work / float(times[x]) for name, x in candidates.items()}


def rows(op: str, lines: list[Line], bounds: Mapping[str, float], seconds: float) -> list[dict]:
    """Time the lines together. The speed-up is over the best rival.

    A program that was not timed has the reason in place of its time.
    """
    times = measure([x for line in lines for x in (*line.rivals.values(), line.ours)], seconds)
    table = []
    for line in lines:
        rivals = {name: times[x] for name, x in line.rivals.items()}
        timed = {name: x for name, x in rivals.items() if isinstance(x, float)}
        best = min(timed, key=lambda name: timed[name]) if timed else None
        rates = {**bounds} | {name: line.rivals[name].work / x for name, x in timed.items()}
        bound, result = rates.get(line.bound), times[line.ours]
        row = dict.fromkeys(COLUMNS) | {"op": op, "unit": line.unit, "bound by": line.bound}
        row |= {
            "shape": line.shape,
            "implementation": line.implementation,
            "ms": result,
            "best rival": best,
        }
        row |= {"bound": bound and bound / UNITS[line.unit], "its ms": best and 1e3 * timed[best]}
        row["rivals"] = {name: 1e3 * x if isinstance(x, float) else x for name, x in rivals.items()}
        if isinstance(result, float):
            rate = line.ours.work / result
            row |= {
                "ms": 1e3 * result,
                "rate": rate / UNITS[line.unit],
                "of the bound": bound and rate / bound,
            }
            row["speed-up"] = best and timed[best] / result
        table.append(row)
    return table


def cells(values: Iterable[Any]) -> str:
    """Return a row of a table in GitHub's Markdown."""

    def formatted(x: Any) -> str:
        if isinstance(x, dict):
            return "; ".join(f"{name}: {formatted(item)}" for name, item in x.items())
        return "" if x is None else f"{x:.4g}" if isinstance(x, float) else str(x).replace("|", "\\|")

    return f"| {' | '.join(map(formatted, values))} |"


def check(checks: Iterable[Check], implementations: tuple[str, ...]) -> dict[str, float]:
    """Return the largest error of each implementation. Exit at the first error above its limit."""
    errors_by_case = {}
    for case in checks:
        exact = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, case.args)
        with jax.default_matmul_precision("highest"):
            expected = jax.tree.leaves(jax.jit(functools.partial(case.call, "reference"))(*exact))
        for name in implementations:
            actual = jax.tree.leaves(jax.jit(functools.partial(case.call, name))(*case.args))
            errors_by_case[f"{case.name} {name}"] = errors = [
                error(x, y, by_row=not case.gradient) for x, y in zip(actual, expected, strict=True)
            ]
            limits = [LIMITS.get(x.dtype, 0.0) for x in actual]
            if not all(x <= limit for x, limit in zip(errors, limits, strict=True)):
                sys.exit(f"not timed: {case.name} of {name!r} is off by {errors}, allowed is {limits}")
    return {name: max(errors) for name, errors in errors_by_case.items()}


def error(actual: jax.Array, expected: jax.Array, *, by_row: bool) -> float:
    """Return the largest difference, relative to the norm of its row (along the last axis) or to the largest number.

    With many keys outputs average out to small numbers. One norm for all queries would hide errors of these.
    """
    actual, expected = (x.astype(jnp.float32) for x in (actual, expected))
    difference = jnp.where(actual == expected, 0, jnp.abs(actual - expected))
    size = jnp.where(jnp.isfinite(expected), jnp.abs(expected), 0)
    difference, size = (jnp.linalg.norm(x, axis=-1) if by_row else jnp.max(x) for x in (difference, size))
    worst = jnp.max(jnp.where(difference == 0, 0, difference / size))
    return float(jnp.where(jnp.isnan(worst), jnp.inf, worst))


def run(
    op: str,
    usual: Callable[[], tuple[str, ...]],
    checks: Callable[[jax.Array, Any], Iterable[Check]],
    parts: list[Part],
    arguments: list[str] | None,
) -> list[dict]:
    """Run the command `python -m pallas_kernels.OP.bench`: check the op, time it and its rivals, print the table.

    `usual()` returns the implementations that are timed by default. The checks of `checks(key, dtype)` run before any
    timing.
    """
    parser = argparse.ArgumentParser(
        f"python -m pallas_kernels.{op}.bench",
        description=f"Check {op} and time it and its rivals on this device.",
    )
    parser.add_argument("--tokens", type=int, nargs="+", help="contexts in place of the usual ones")
    parser.add_argument(
        "--implementations", nargs="+", help="implementations to time in place of this device's default"
    )
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args(arguments)
    # Leave memory to torch. JAX reads these variables when it first uses the device.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    cpu = jax.default_backend() == "cpu"
    setting = CPU if cpu else ACCELERATOR
    implementations = tuple(options.implementations or usual())
    seed = time.time_ns() % 2**31
    key = jax.random.key(seed)
    errors = check(checks(key, setting.dtype), implementations)
    rates = bounds(setting, key)
    header = (
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {time.strftime('%Y-%m-%d')}, seed {seed}"
    )
    print(f"{header}\n\nerrors: {', '.join(f'{name} {x:.1e}' for name, x in errors.items())}\n")
    table = []
    for part in parts:
        for s in options.tokens or (part.cpu if cpu else part.accelerator):
            new = rows(part.name, part.lines(setting, key, s, implementations), rates, setting.seconds)
            if not table:
                print(cells(new[0]), cells(["---"] * len(new[0])), sep="\n")
            print(*map(cells, map(dict.values, new)), sep="\n", flush=True)
            table += new
            if "torch" in sys.modules:
                # Free the memory that torch caches, so that JAX can use it.
                sys.modules["torch"].cuda.empty_cache()
    if options.json:
        content = {"where": header, "errors": errors, "bounds": rates, "rows": table}
        options.json.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return table


def random(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Return normal random numbers. Large arrays repeat a part of them, since sampling them all takes memory."""
    size = math.prod(shape)
    part = jax.random.normal(key, (min(size, 1 << 26),), dtype)
    return jnp.resize(part, shape) if size > part.size else part.reshape(shape)


def tokens(n: int) -> str:
    """Format a number of tokens, such as "8K" for 8192."""
    return f"{n // 1024}K" if n % 1024 == 0 else str(n)
