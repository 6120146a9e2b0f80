"""Periods of layers: a model whose layers are of two kinds, full attention and a sliding window, as a few scans."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Segment(NamedTuple):
    """Layers that follow one another and repeat a period, so that one scan runs them."""

    first: int
    """The index of the first layer."""
    slides: tuple[bool, ...]
    """For each layer of a period, True if it has a sliding window."""
    repeats: int
    """The number of periods."""

    @property
    def layers(self) -> int:
        """The number of layers."""
        return self.repeats * len(self.slides)


def segments(slides: tuple[bool, ...]) -> list[Segment]:
    """Return the segments of a model: periods that repeat, and otherwise runs of layers of one kind. A model without
    full attention has an empty segment of it at the end."""
    found, first = [], 0
    while first < len(slides):
        rest = slides[first:]
        size = next(n for n in range(1, len(rest) + 1) if rest == (rest[:n] * len(rest))[: len(rest)])
        if size <= len(rest) // 2 or size == 1:
            found.append(Segment(first, rest[:size], len(rest) // size))
        else:
            run = next(n for n, one in enumerate(rest) if one != rest[0])
            found.append(Segment(first, rest[:1], run))
        first += found[-1].layers
    return [*found, Segment(first, (False,), 0)] if all(slides) else found


def by_period(stacked: Any, first: int, size: int, repeats: int) -> Any:
    """Return the values of layers from the `first` on, given those of all layers, with a leading axis for periods of
    `size` layers, and after it one for a period's layers unless it has one layer."""

    def of(x):
        x = x if size * repeats == len(x) else x[first : first + size * repeats]
        return x if size == 1 else x.reshape(repeats, size, *x.shape[1:])

    return jax.tree.map(of, stacked)


def member(values: Any, at: int, size: int) -> Any:
    """Return the values of one layer of a period of `size` layers."""
    return values if size == 1 else jax.tree.map(lambda x: x[at], values)


def in_order(members: Sequence[Any]) -> Any:
    """Return the values of all layers of a segment, given those of each member of a period with a leading axis for the
    periods; None if a period has none."""
    if not members:
        return None
    if len(members) == 1:
        return members[0]
    return jax.tree.map(lambda *x: jnp.stack(x, 1).reshape(-1, *x[0].shape[1:]), *members)


def joined(parts: Sequence[Any]) -> Any:
    """Return the values of all layers, given those of segments."""
    parts = [part for part in parts if part is not None]
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *x: jnp.concatenate(x), *parts) if parts else None
