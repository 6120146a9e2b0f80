"""`attention_mass` as one or two passes of the same form. An implementation only provides that pass.

A pass keeps `resident` rows and streams the others past them:

    log_{b,x,r} = log Σ_u exp(resident_{b,r} · streamed_{b,x,u} / sqrt(h) + bias_{b,x,u}),    alive u in span(r)

or the maximum in place of log Σ exp. The mass of keys streams queries past the keys, with -lse as bias. If no lse is
given, an earlier pass streams the alive keys past the queries.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.softmax import MASKED

FLOOR = MASKED / 2
"""The initial value of running maxima. Masked logits are so far below it that they add nothing."""


class Span(NamedTuple):
    """The interval of streamed rows that each resident row counts. Its ends never decrease from one row to the next."""

    rows: int
    """The number of streamed rows."""
    start: int | None = None
    """Row r counts streamed rows from r + start on. None: from the first row on."""
    stop: int | None = None
    """Row r counts streamed rows before r // repeats + stop. None: up to the last row."""
    repeats: int = 1
    """The number of consecutive resident rows that share an index: the heads of a group."""

    def low(self, r):
        return jnp.zeros_like(r) if self.start is None else jnp.clip(r + self.start, 0, self.rows)

    def high(self, r):
        if self.stop is None:
            return jnp.full_like(r, self.rows)
        return jnp.clip(r // self.repeats + self.stop, 0, self.rows)

    def tiles(self, first, last, size: int):
        """Return `start`, `whole_start`, `whole_stop`, `stop` for the resident rows `first` to `last`.

        Some of these rows count something in the tiles (of `size` streamed rows) from `start` to `stop`. All of them
        count all of the tiles from `whole_start` to `whole_stop`.
        """
        start, stop = self.low(first) // size, (self.high(last) + size - 1) // size
        whole_start = jnp.clip((self.low(last) + size - 1) // size, start, jnp.maximum(start, stop))
        return (
            start,
            whole_start,
            jnp.clip(self.high(first) // size, whole_start, jnp.maximum(whole_start, stop)),
            stop,
        )


class Column(NamedTuple):
    """A number for every streamed row: an addend to its logits or, with `choose`, a flag that makes the row count."""

    value: Float[Array, "b x u"]
    """The addend (MASKED: the row adds nothing). With `choose`, 1 if the row counts, 0 if not: it may then hold NaN."""
    choose: bool


def apply(choose: bool, logits, value):
    """Apply the rows' values, which broadcast, to the logits."""
    return jnp.where(value > 0, logits, MASKED) if choose else logits + value


LogMass = Callable[
    [Float[Array, "b r h"], Float[Array, "b x u h"], Column | None, Span, bool], Float[Array, "b x r"]
]
"""A pass. Its arguments are resident rows, streamed rows, their column, the span, and True to take the maximum.

The result is -inf for a row that counts nothing.
"""


def mass(log_mass: LogMass, q, k, valid, lse, query_factor, key_factor, over, group, offset):
    """Compute the whole op with the pass `log_mass`; the other arguments are those of an implementation."""
    b, n, t, h = q.shape
    heads, s = k.shape[1:3]
    g = n // heads
    q = q.reshape(b * heads, g, t, h)
    keys = k.reshape(b * heads, s, h)
    if lse is None:
        lse = _log_sum_exp(log_mass, q, keys, valid, None if offset is None else s - t)
    else:
        lse = lse.reshape(b * heads, g, t).astype(jnp.float32)
        q = jnp.where((lse > -jnp.inf)[..., None], q, 0)
    addend = -lse if query_factor is None else jnp.log(query_factor.reshape(lse.shape)) - lse
    column = Column(jnp.where(lse > -jnp.inf, addend, MASKED), choose=False)
    span = Span(t, start=None if offset is None else offset + t - s)
    log = log_mass(keys, q, column, span, over == "max").reshape(b, heads, g, s)
    if key_factor is not None:
        log += jnp.log(key_factor.reshape(log.shape))
    log = log.max(2) if group == "max" else jax.nn.logsumexp(log, 2)
    if group == "mean":
        log -= jnp.log(g)
    if valid is not None:
        log = jnp.where(valid, log, -jnp.inf)
    return log if over == "logsumexp" else jnp.exp(log)


def _log_sum_exp(log_mass, q, keys, valid, first):
    """Return the log-sum-exp `[b g t]` of queries `[b g t h]` over keys `[b s h]`.

    `first` is the first query's index if attention is causal, else None.
    """
    b, g, t, h = q.shape
    s = keys.shape[1]
    column = None if valid is None else Column(valid.reshape(b, 1, s).astype(jnp.float32), choose=True)
    # A group's heads are consecutive rows, so that a few queries of many heads read the keys once.
    rows = q.swapaxes(1, 2).reshape(b, t * g, h)
    span = Span(s, stop=None if first is None else first + 1, repeats=g)
    lse = log_mass(rows, keys[:, None], column, span, False)
    return lse.reshape(b, t, g).swapaxes(1, 2)
