"""What a kernel of `vertical_slash` reads: lists of keys, in order, each key with the interval of queries that see it.

A block of queries walks a list from some tile to another, and a tile that all of its queries see needs no mask. Where
something is different beyond the window there are two lists. The band holds every key, for the queries within the
window. The far list holds, for the queries beyond, only the keys that some of them see, gathered in order: causality is
then a prefix of it, and work and memory traffic are what is visible.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels.softmax import MASKED

FOREVER = jnp.iinfo(jnp.int32).max


class Keys(NamedTuple):
    """A list of keys of each (sequence, kv head) row `r`. Query `I` sees an entry iff `start <= I < stop`; along a row
    `start` does not fall. A gate is finite. `k` and `v` may be those of more rows, or without the padding that the
    others have."""

    k: Shaped[Array, "r c h"]
    """After RoPE."""
    v: Shaped[Array, "r c h"]
    """Beside them."""
    start: Int[Array, "r c"]
    stop: Int[Array, "r c"]
    log_gate: Float[Array, "r c"] | None
    """Added to the key's logits; None: nothing is."""


class Tiles(NamedTuple):
    """Of each tile of a list: from which query on all of its keys are seen, until which, and until which any is."""

    ready: Int[Array, "r j"]
    """From which query on all are seen."""
    full_until: Int[Array, "r j"]
    """Until which all are."""
    gone: Int[Array, "r j"]
    """From which on none is."""


class Spans(NamedTuple):
    """The tiles that each block of queries walks: from `past` to `begun`, and up to `full` it needs no mask."""

    past: Int[Array, "r i"]
    full: Int[Array, "r i"]
    begun: Int[Array, "r i"]


def tiles(keys: Keys, size: int) -> Tiles:
    start, stop = (x.reshape(x.shape[0], -1, size) for x in (keys.start, keys.stop))
    return Tiles(start.max(-1), stop.min(-1), stop.max(-1))


def spans(keys: Keys, size: int, first: Int[Array, " i"], last: Int[Array, " i"]) -> Spans:
    """For blocks of the queries `first` to `last`. All blocks are compared with all tiles, in one pass that keeps
    nothing; a binary search is a loop of small kernels, a millisecond on an H100."""
    ready, full_until, gone = (x[:, None] for x in tiles(keys, size))
    opens = keys.start[:, None, ::size]
    first, last = first[:, None], last[:, None]
    place = jnp.arange(ready.shape[2], dtype=jnp.int32)

    def before(stopping):
        """How many tiles from the left stand before the first that is stopping."""
        return jnp.min(jnp.where(stopping, place, ready.shape[2]), 2)

    begun = jnp.sum(opens <= last, 2, dtype=jnp.int32)
    full = jnp.minimum(jnp.sum(ready <= first, 2, dtype=jnp.int32), before(full_until <= last))
    return Spans(jnp.minimum(before(gone > first), begun), full, begun)


def padded(keys: Keys, multiple: int) -> Keys:
    """With entries that nobody sees up to a multiple of a tile's size."""
    more = -keys.k.shape[1] % multiple
    k, v = (jnp.pad(x, ((0, 0), (0, more), (0, 0))) for x in (keys.k, keys.v))
    return marked(keys._replace(k=k, v=v), multiple)


def marked(keys: Keys, multiple: int) -> Keys:
    """The same of all but keys and values, which are not copied."""
    row = (0, 0), (0, -keys.start.shape[1] % multiple)
    start = jnp.pad(keys.start, row, constant_values=FOREVER)
    gate = None if keys.log_gate is None else jnp.pad(keys.log_gate, row)
    return keys._replace(start=start, stop=jnp.pad(keys.stop, row), log_gate=gate)


def by_row(*arrays: Shaped[Array, "b k ..."] | None) -> Any:
    """An op's arguments as `[r …]`."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), arrays)


def shown_by_row(
    k: Shaped[Array, "b k s h"],
    v: Shaped[Array, "b k s h"],
    end: Int[Array, "b k s"] | None,
    log_gate: Float[Array, "b k s"] | None,
) -> Any:
    """The same for kernels whose products take keys as they stand: with zeros where no query ever looks."""
    if end is not None:
        k, v = shown(k, end), shown(v, end)
    return by_row(k, v, end, log_gate)


def seen(keys: Keys) -> Keys:
    """The entries that some query sees, in order, then such that nobody does."""
    at = compact(keys.start < keys.stop, keys.start.shape[1])
    row = jnp.arange(at.shape[0])[:, None]
    found = jax.tree.map(lambda x: x.at[row, at].get(mode="fill", fill_value=0), keys)
    return found._replace(start=jnp.where(at < at.shape[1], found.start, FOREVER))


def in_place(
    k: Shaped[Array, "r s h"],
    v: Shaped[Array, "r s h"],
    end: Int[Array, "r s"] | None,
    log_gate: Float[Array, "r s"] | None,
    window: int,
) -> tuple[Keys | None, Keys]:
    """Band and far list, both of all keys; no band if nothing is different beyond the window."""
    band, far = both(k, v, end, log_gate, window)
    return (None, far._replace(start=band.start)) if log_gate is None else (band, far)


def gathered(
    k: Shaped[Array, "r s h"],
    v: Shaped[Array, "r s h"],
    end: Int[Array, "r s"] | None,
    log_gate: Float[Array, "r s"] | None,
    window: int,
) -> tuple[Keys | None, Keys]:
    """The same, with only those keys in the far list that some query beyond the window sees."""
    if end is None:
        return in_place(k, v, end, log_gate, window)
    band, far = both(k, v, end, log_gate, window)
    return band, seen(far)


def both(
    k: Shaped[Array, "r s h"],
    v: Shaped[Array, "r s h"],
    end: Int[Array, "x s"] | None,
    log_gate: Float[Array, "x s"] | None,
    window: int,
) -> tuple[Keys, Keys]:
    """Band and far list of all keys, of the rows that `end` has."""
    shape = k.shape[:2] if end is None else end.shape
    index = jnp.broadcast_to(jnp.arange(k.shape[1], dtype=jnp.int32), shape)
    stop = jnp.full_like(index, FOREVER) if end is None else end
    gate = None if log_gate is None else jnp.maximum(log_gate, MASKED)
    band = Keys(k, v, index, jnp.minimum(stop, index + window), None)
    return band, Keys(k, v, index + window, stop, gate)


def shown(x: Shaped[Array, "*r s h"], end: Int[Array, "*r s"]) -> Shaped[Array, "*r s h"]:
    """`x` with zeros where no query ever looks: what stands there may be NaN, and NaN times 0 is NaN."""
    return jnp.where((end > jnp.arange(end.shape[-1]))[..., None], x, 0)


def compact(chosen: Bool[Array, "*r s"], size: int) -> Int[Array, "*r {size}"]:
    """The places of the True entries in order, then `s`, to a length of `size`."""
    s = chosen.shape[-1]
    rows = chosen.reshape(-1, s)
    slot = jnp.where(rows, jnp.cumsum(rows, -1, dtype=jnp.int32) - 1, size)
    place = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32), rows.shape)
    empty = jnp.full_like(rows, s, jnp.int32, shape=(rows.shape[0], size))
    at = empty.at[jnp.arange(rows.shape[0])[:, None], slot].set(place, mode="drop")
    return at.reshape(*chosen.shape[:-1], size)
