"""A log of what a cache holds at each call of the model, from which `kvjax.evaluate.footprint` computes footprints."""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from kvjax.cache import Cache
from kvjax.errors import UserError
from kvjax.mesh import on_host


class Call(NamedTuple):
    """A call of the model for a batch of sequences. Every decoded token is one."""

    held: Float[np.ndarray, " b"]
    """Entries of a kv head before the call, the mean over layers and heads."""
    seen: Int[np.ndarray, " b"]
    """Tokens of the sequence before the call."""
    tokens: Int[np.ndarray, " b"]
    """Tokens of the call."""


_open_log: ContextVar[list[Call] | None] = ContextVar("open_log", default=None)


@contextlib.contextmanager
def footprint_log(before: Sequence[Call] = ()) -> Iterator[list[Call]]:
    """Log the calls of a `with` statement, after those in `before`. All must be for one batch of sequences."""
    log = [*before]
    outer = _open_log.set(log)
    try:
        yield log
    finally:
        _open_log.reset(outer)


def log_call(cache: Cache, rows: Sequence[Int[np.ndarray, " _"]]) -> None:
    """Log the call that runs `rows` over `cache`, before it runs, if a log is open."""
    if (log := _open_log.get()) is not None:
        tokens = np.array([row.size for row in rows])
        seen, origin = on_host(cache.seen), on_host(cache.origin)
        _add(log, on_host(cache.layers.length), seen, origin, cache.window, tokens)


def log_steps(
    before: Sequence[Shaped[Array | np.ndarray, "..."]],
    origin: Int[Array | np.ndarray, " b"],
    window: int,
    *,
    count: int,
    sequences: int,
) -> None:
    """Log the first `count` decoded tokens, if a log is open. `before` is what `decode` returns; `origin` and `window`
    are those of its cache, for the same rows."""
    if (log := _open_log.get()) is not None:
        origin = on_host(origin)
        for length, seen, running in zip(*(on_host(x)[:count] for x in before), strict=True):
            _add(log, length, seen, origin, window, running[:sequences].astype(np.int32))


def _add(log: list[Call], length, seen, origin, window, tokens) -> None:
    sequences = len(tokens)
    seen = seen[:sequences].copy()  # the cache is donated
    if log and (len(log[0].tokens) != sequences or not seen.any()):
        raise UserError("a footprint log is for one batch of sequences: open another one for the next batch")
    local = np.minimum(seen - origin[:sequences], window - 1)
    log.append(Call(length[:, :sequences].mean((0, 2)) + local, seen, tokens))
