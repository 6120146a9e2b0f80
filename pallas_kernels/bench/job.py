"""What is timed together, and what becomes of it."""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.bench.setting import Setting
from pallas_kernels.bench.timing import Candidate, Failed, measure, reason

UNITS = {"TFLOP/s": 1e12, "TB/s": 1e12, "Gkey/s": 1e9}


class Line(NamedTuple):
    """A row to be: the candidate it is about and, by their names in the row, the candidates that are its rivals, which
    give the same, or the same of all keys.

    `bound` names what its rate is held against, a candidate or what `bounds.py` measures; `floor` candidates that are
    shown beside it, but do less.
    """

    shape: str
    """In words."""
    ours: str
    """A candidate."""
    rivals: dict[str, str]
    """Candidates by their names in the row."""
    unit: str
    """Of the rate."""
    bound: str
    floor: tuple[str, ...] = ()


def compared(share: str) -> bool:
    """Whether the row of a share of kept keys has rivals with the same mask: the aim's, and the hardest. Of the others
    they would only take time."""
    return share.startswith("25%") or share.endswith("one head")


class Job(NamedTuple):
    """Candidates on the same inputs, and the rows that their times become."""

    candidates: dict[str, Candidate]
    """By name."""
    lines: list[Line]
    """The rows to be."""


class Task(NamedTuple):
    """A job before its arrays are made."""

    op: str
    """Its name."""
    shape: str
    """In words."""
    make: Callable[[], Job]
    """Makes the arrays."""


EMPTY = dict.fromkeys(
    (
        *("op", "shape", "implementation", "seconds", "rate", "unit", "bound", "bound_name", "fraction"),
        *("rival", "rival_seconds", "speed_up", "others", "error"),
    )
)
"""A row's fields."""


def rows(task: Task, bounds: Mapping[str, float], setting: Setting) -> list[dict]:
    try:
        job = task.make()
    except Exception as error:
        return [EMPTY | {"op": task.op, "shape": task.shape, "others": {}, "error": reason(error)}]
    times = measure(job.candidates, batch=setting.batch, seconds=setting.seconds)
    return [EMPTY | {"op": task.op} | _row(job, line, times, bounds) for line in job.lines]


def _row(job: Job, line: Line, times: Mapping[str, float | Failed], bounds: Mapping[str, float]) -> dict:
    unit = UNITS[line.unit]
    beside = line.rivals | {name: name for name in line.floor}
    own = times[line.ours]
    row = {
        "shape": line.shape,
        "implementation": line.ours,
        "unit": line.unit,
        "others": {name: _shown(times[candidate]) for name, candidate in beside.items()},
    }
    bound, row["bound_name"] = _bound(job, line, times, bounds)
    row["bound"] = None if bound is None else bound / unit
    timed = {name: x for name in line.rivals if isinstance(x := row["others"][name], float)}
    if timed:
        row["rival"] = min(timed, key=lambda name: timed[name])
        row["rival_seconds"] = timed[row["rival"]]
    if isinstance(own, Failed):
        return row | {"error": own.reason}
    rate = job.candidates[line.ours].work / own
    row |= {"seconds": own, "rate": rate / unit}
    if bound is not None:
        row["fraction"] = rate / bound
    if timed:
        row["speed_up"] = row["rival_seconds"] / own
    return row


def _shown(time: float | Failed) -> float | str:
    return time.reason if isinstance(time, Failed) else time


def _bound(job, line, times, bounds) -> tuple[float | None, str]:
    """Of work a second, and its name; the matrix product's where the candidate that is meant could not run."""
    if line.bound in bounds:
        return bounds[line.bound], line.bound
    time = times[line.bound]
    if not isinstance(time, Failed):
        return job.candidates[line.bound].work / time, line.bound
    return (bounds["matrix product"], "matrix product") if line.unit == "TFLOP/s" else (None, line.bound)


def random(key: jax.Array, shape: tuple[int, ...], dtype) -> jax.Array:
    """Normal numbers; large arrays repeat a part of them, since making them all takes memory."""
    size = math.prod(shape)
    part = jax.random.normal(key, (min(size, 1 << 26),), dtype)
    return jnp.resize(part, shape) if size > part.size else part.reshape(shape)


def tokens(n: int) -> str:
    return f"{n // 1024}K" if n % 1024 == 0 else str(n)
