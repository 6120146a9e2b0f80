"""The lists of keys that the kernels of `vertical_slash` read. Each key has the interval of queries that see it.

A block of queries walks over a range of tiles of a list. A tile that all of its queries see needs no mask. There are
two lists if visibility or gates differ beyond the window. The band contains every key, for the queries within the
window. The far list contains, for the queries beyond the window, only the keys that some of them see, gathered in
order. Causality is then a prefix of the list, and work and memory traffic are proportional to the number of visible
pairs.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels.softmax import MASKED

FOREVER = jnp.iinfo(jnp.int32).max
"""The `end` of a key that stays for good."""


class Keys(NamedTuple):
    """A list of keys for each (sequence, kv head) row `r`.

    Query `I` sees an entry iff `start <= I < stop`. Along a row `start` does not decrease. Gates are finite. `k` and
    `v` may have more rows than the others, or lack their padding.
    """

    k: Shaped[Array, "r c h"]
    """Keys after RoPE."""
    v: Shaped[Array, "r c h"]
    start: Int[Array, "r c"]
    stop: Int[Array, "r c"]
    log_gate: Float[Array, "r c"] | None
    """The addend to the key's logits. None: no addend."""


class Tiles(NamedTuple):
    """The queries that see each tile of a list."""

    ready: Int[Array, "r j"]
    """The first query from which on all keys have started."""
    full_until: Int[Array, "r j"]
    """The first query at which a key has stopped."""
    gone: Int[Array, "r j"]
    """The first query from which on no key is seen."""


class Spans(NamedTuple):
    """The tiles that each block of queries walks over: those from `past` to `begun`. Up to `full` they need no mask."""

    past: Int[Array, "r i"]
    full: Int[Array, "r i"]
    begun: Int[Array, "r i"]


def tiles(keys: Keys, size: int) -> Tiles:
    start, stop = (x.reshape(x.shape[0], -1, size) for x in (keys.start, keys.stop))
    return Tiles(start.max(-1), stop.min(-1), stop.max(-1))


def spans(keys: Keys, size: int, first: Int[Array, " i"], last: Int[Array, " i"]) -> Spans:
    """Return the spans of blocks of the queries `first` to `last`.

    All blocks are compared with all tiles, in one pass that stores no intermediate results. A binary search would be a
    loop of small kernels, which takes a millisecond on an H100.
    """
    ready, full_until, gone = (x[:, None] for x in tiles(keys, size))
    opens = keys.start[:, None, ::size]
    first, last = first[:, None], last[:, None]
    place = jnp.arange(ready.shape[2], dtype=jnp.int32)

    def before(stopping):
        """Return the number of tiles before the first that is stopping."""
        return jnp.min(jnp.where(stopping, place, ready.shape[2]), 2)

    begun = jnp.sum(opens <= last, 2, dtype=jnp.int32)
    full = jnp.minimum(jnp.sum(ready <= first, 2, dtype=jnp.int32), before(full_until <= last))
    return Spans(jnp.minimum(before(gone > first), begun), full, begun)


def pad(keys: Keys, multiple: int) -> Keys:
    """Pad the list to a multiple of a tile's size with entries that no query sees."""
    more = -keys.k.shape[1] % multiple
    k, v = (jnp.pad(x, ((0, 0), (0, more), (0, 0))) for x in (keys.k, keys.v))
    return pad_marks(keys._replace(k=k, v=v), multiple)


def pad_marks(keys: Keys, multiple: int) -> Keys:
    """Pad the list with entries that no query sees, except keys and values, which are not copied."""
    row = (0, 0), (0, -keys.start.shape[1] % multiple)
    start = jnp.pad(keys.start, row, constant_values=FOREVER)
    gate = None if keys.log_gate is None else jnp.pad(keys.log_gate, row)
    return keys._replace(start=start, stop=jnp.pad(keys.stop, row), log_gate=gate)


def by_row(*arrays: Shaped[Array, "b k ..."] | None) -> Any:
    """Reshape arguments to `[r …]`."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), arrays)


def zero_unseen_by_row(
    k: Shaped[Array, "b k s h"],
    v: Shaped[Array, "b k s h"],
    end: Int[Array, "b k s"] | None,
    log_gate: Float[Array, "b k s"] | None,
) -> Any:
    """Reshape the arguments to `[r …]`, with zeros for keys and values that no query sees.

    Kernels that read them in place need the zeros, since 0 · NaN is NaN.
    """
    if end is not None:
        k, v = zero_unseen(k, end), zero_unseen(v, end)
    return by_row(k, v, end, log_gate)


def gather_seen(keys: Keys) -> Keys:
    """Gather the entries that some query sees, in order, followed by entries that no query sees."""
    at = compact(keys.start < keys.stop, keys.start.shape[1])
    row = jnp.arange(at.shape[0])[:, None]
    entries = jax.tree.map(lambda x: x.at[row, at].get(mode="fill", fill_value=0), keys)
    return entries._replace(start=jnp.where(at < at.shape[1], entries.start, FOREVER))


def in_place(
    k: Shaped[Array, "r s h"],
    v: Shaped[Array, "r s h"],
    end: Int[Array, "r s"] | None,
    log_gate: Float[Array, "r s"] | None,
    window: int,
) -> tuple[Keys | None, Keys]:
    """Return band and far list of all keys. Without gates the band is None, and the far list starts at each key."""
    band, far = band_and_far(k, v, end, log_gate, window)
    return (None, far._replace(start=band.start)) if log_gate is None else (band, far)


def gathered(
    k: Shaped[Array, "r s h"],
    v: Shaped[Array, "r s h"],
    end: Int[Array, "r s"] | None,
    log_gate: Float[Array, "r s"] | None,
    window: int,
) -> tuple[Keys | None, Keys]:
    """Return the band and a far list of only those keys that some query beyond the window sees.

    Without `end` this is `in_place`.
    """
    if end is None:
        return in_place(k, v, end, log_gate, window)
    band, far = band_and_far(k, v, end, log_gate, window)
    return band, gather_seen(far)


def band_and_far(
    k: Shaped[Array, "r s h"],
    v: Shaped[Array, "r s h"],
    end: Int[Array, "x s"] | None,
    log_gate: Float[Array, "x s"] | None,
    window: int,
) -> tuple[Keys, Keys]:
    """Return band and far list of all keys, for the rows of `end`."""
    shape = k.shape[:2] if end is None else end.shape
    index = jnp.broadcast_to(jnp.arange(k.shape[1], dtype=jnp.int32), shape)
    stop = jnp.full_like(index, FOREVER) if end is None else end
    gate = None if log_gate is None else jnp.maximum(log_gate, MASKED)
    band = Keys(k, v, index, jnp.minimum(stop, index + window), None)
    return band, Keys(k, v, index + window, stop, gate)


def zero_unseen(x: Shaped[Array, "*r s h"], end: Int[Array, "*r s"]) -> Shaped[Array, "*r s h"]:
    """Return `x` with zeros for keys that no query sees, which may be NaN."""
    return jnp.where((end > jnp.arange(end.shape[-1]))[..., None], x, 0)


def compact(chosen: Bool[Array, "*r s"], size: int) -> Int[Array, "*r {size}"]:
    """Return the indices of the True entries in order, padded with `s` to a length of `size`."""
    s = chosen.shape[-1]
    rows = chosen.reshape(-1, s)
    slot = jnp.where(rows, jnp.cumsum(rows, -1, dtype=jnp.int32) - 1, size)
    place = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32), rows.shape)
    empty = jnp.full_like(rows, s, jnp.int32, shape=(rows.shape[0], size))
    at = empty.at[jnp.arange(rows.shape[0])[:, None], slot].set(place, mode="drop")
    return at.reshape(*chosen.shape[:-1], size)
