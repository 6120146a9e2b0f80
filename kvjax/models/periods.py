"""Repeating periods of layers, so that a model with full-attention and sliding-window layers runs as a few scans."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Segment(NamedTuple):
    """Consecutive layers that repeat a period. One scan runs them."""

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
    """Return the segments of a model. Layers that do not repeat a period form runs of one kind. A model without full
    attention has an empty segment of full attention at the end."""
    result, first = [], 0
    while first < len(slides):
        rest = slides[first:]
        size = next(n for n in range(1, len(rest) + 1) if rest == (rest[:n] * len(rest))[: len(rest)])
        if size <= len(rest) // 2 or size == 1:
            result.append(Segment(first, rest[:size], len(rest) // size))
        else:
            run = next(n for n, slides_here in enumerate(rest) if slides_here != rest[0])
            result.append(Segment(first, rest[:1], run))
        first += result[-1].layers
    return [*result, Segment(first, (False,), 0)] if all(slides) else result


def by_period(stacked: Any, first: int, size: int, repeats: int) -> Any:
    """Return the values of `size · repeats` layers from the `first` on as [repeats, size, ...], or as [repeats, ...] if
    a period has one layer. `stacked` has the values of all layers."""

    def group(x):
        x = x if size * repeats == len(x) else x[first : first + size * repeats]
        return x if size == 1 else x.reshape(repeats, size, *x.shape[1:])

    return jax.tree.map(group, stacked)


def member(values: Any, index: int, size: int) -> Any:
    """Return the values of one layer of a period of `size` layers."""
    return values if size == 1 else jax.tree.map(lambda x: x[index], values)


def in_order(members: Sequence[Any]) -> Any:
    """Return the values of all layers of a segment in the order of layers; None if there are none. Each of `members`
    has the values of one layer of the period, [periods, ...]."""
    if not members:
        return None
    if len(members) == 1:
        return members[0]
    return jax.tree.map(lambda *x: jnp.stack(x, 1).reshape(-1, *x[0].shape[1:]), *members)


def joined(parts: Sequence[Any]) -> Any:
    """Return the values of all layers, given the values of each segment (or None)."""
    parts = [part for part in parts if part is not None]
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *x: jnp.concatenate(x), *parts) if parts else None
