"""`attention_mass` as one or two passes of the same kind, which is all that an implementation is.

A pass holds `resident` rows and lets `streamed` ones go by:

    log_{b,x,r} = log Σ_u exp(resident_{b,r} · streamed_{b,x,u} / sqrt(h) + bias_{b,x,u}),    alive u in span(r)

or the maximum in place of log Σ exp. The mass of keys streams queries past the keys, with -lse as bias. Where no lse is
given, a pass before it streams the keys that are alive past the queries.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.softmax import MASKED

FLOOR = MASKED / 2
"""What running maxima start from: a masked logit is so far below it that it adds nothing."""


class Span(NamedTuple):
    """The streamed rows that a resident row counts: an interval whose ends never fall from one row to the next."""

    rows: int
    """How many streamed rows there are."""
    start: int | None = None
    """Row r counts none before r + start; None: from the first."""
    stop: int | None = None
    """Row r counts none from r // repeats + stop; None: up to the last."""
    repeats: int = 1
    """Resident rows of one index, a group's heads side by side."""

    def low(self, r):
        return jnp.zeros_like(r) if self.start is None else jnp.clip(r + self.start, 0, self.rows)

    def high(self, r):
        if self.stop is None:
            return jnp.full_like(r, self.rows)
        return jnp.clip(r // self.repeats + self.stop, 0, self.rows)

    def tiles(self, first, last, size: int):
        """Tiles of `size` streamed rows that the resident rows `first` to `last` count any of: `start`, `whole_start`,
        `whole_stop`, `stop`. From `whole_start` to `whole_stop` all of them count all of a tile."""
        start, stop = self.low(first) // size, (self.high(last) + size - 1) // size
        whole_start = jnp.clip((self.low(last) + size - 1) // size, start, jnp.maximum(start, stop))
        return (
            start,
            whole_start,
            jnp.clip(self.high(first) // size, whole_start, jnp.maximum(whole_start, stop)),
            stop,
        )


class Column(NamedTuple):
    """A number for every streamed row: what is added to its logits, or, to `choose`, whether it counts at all."""

    value: Float[Array, "b x u"]
    """The addend (MASKED: the row adds nothing); to choose, 1 for a row that counts and 0 for one that may hold NaN."""
    choose: bool


def apply(choose: bool, logits, value):
    """Logits with their rows' values, which broadcast against them."""
    return jnp.where(value > 0, logits, MASKED) if choose else logits + value


LogMass = Callable[
    [Float[Array, "b r h"], Float[Array, "b x u h"], Column | None, Span, bool], Float[Array, "b x r"]
]
"""A pass: resident, streamed, their column, span, whether to take the maximum. -inf where a row counts nothing."""


def mass(log_mass: LogMass, q, k, valid, lse, over, group, offset):
    """The whole op by `log_mass`; arguments as the implementations take them."""
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
    column = Column(jnp.where(lse > -jnp.inf, -lse, MASKED), choose=False)
    span = Span(t, start=None if offset is None else offset + t - s)
    log = log_mass(keys, q, column, span, over == "max").reshape(b, heads, g, s)
    log = log.max(2) if group == "max" else jax.nn.logsumexp(log, 2)
    if group == "mean":
        log -= jnp.log(g)
    if valid is not None:
        log = jnp.where(valid, log, -jnp.inf)
    return log if over == "logsumexp" else jnp.exp(log)


def _log_sum_exp(log_mass, q, keys, valid, first):
    """Of queries `[b g t h]` over keys `[b s h]`, as `[b g t]`; `first` is the first query's index where causal."""
    b, g, t, h = q.shape
    s = keys.shape[1]
    column = None if valid is None else Column(valid.reshape(b, 1, s).astype(jnp.float32), choose=True)
    # A group's heads are neighbours, so that a few queries of many heads read the keys once.
    rows = q.swapaxes(1, 2).reshape(b, t * g, h)
    span = Span(s, stop=None if first is None else first + 1, repeats=g)
    lse = log_mass(rows, keys[:, None], column, span, False)
    return lse.reshape(b, t, g).swapaxes(1, 2)
