"""What would fit: the largest number by a few compiles, and other meshes of as many chips."""

import dataclasses
from collections.abc import Callable, Iterator

from kvjax.command.launch import MeshShape
from kvjax.models.config import ModelConfig
from kvjax.plan.program import TEMPORARIES, Figures

TRIES = 3
"""Compiles that a search may take."""
NEAR = 1.07
"""What is known to fit and what is known not to are this near when a search is over."""


@dataclasses.dataclass(frozen=True)
class Bracket:
    """The largest number that was compiled and fits, and the smallest that does not; None: there was none."""

    fits: int | None
    """The largest that fits."""
    fails: int | None
    """The smallest that does not."""


def fits(found: Figures, usable: int) -> bool:
    """Whether a program fits a device with so many usable bytes."""
    return not found.refused and found.total <= usable


def largest(
    measure: Callable[[int], Figures],
    known: dict[int, Figures],
    usable: int,
    growing: tuple[str, ...],
    most: int,
    multiple: int = 1,
) -> Bracket:
    """The largest number, a length or a batch, for which `measure` fits.

    Memory is taken to be a line through the two numbers nearest to the limit, or through one and what does not grow
    with it; what comes of it is compiled, and again, `TRIES` times at most.

    Args:
        known: what was measured before, one number at least; it is added to.
        usable: bytes of a device.
        growing: the parts that grow with the number.
        most: no larger number means anything.
        multiple: of which numbers are.
    """
    for _ in range(TRIES):
        found = _bracket(known, usable)
        if found.fits == most or (
            found.fits and found.fails and found.fails <= max(found.fits * NEAR, found.fits + 1)
        ):
            break
        guess = _guess(known, usable, growing, found)
        guess = max(rounded_down(min(guess, most)) // multiple, 1) * multiple
        if guess in known:
            break
        known[guess] = measure(guess)
    return _bracket(known, usable)


def _bracket(known: dict[int, Figures], usable: int) -> Bracket:
    good = [number for number, found in known.items() if fits(found, usable)]
    bad = [number for number, found in known.items() if not fits(found, usable)]
    return Bracket(max(good, default=None), min(bad, default=None))


def _guess(known: dict[int, Figures], usable: int, growing: tuple[str, ...], found: Bracket) -> int:
    # a refusal does not always say how much is needed
    said = {number: one.total for number, one in known.items() if not one.refused or one.parts[TEMPORARIES]}
    near = sorted(said, key=lambda number: abs(said[number] - usable))[:2]
    if len(near) == 2 and said[near[0]] != said[near[1]]:
        (a, b) = near
        slope = (said[b] - said[a]) / (b - a)
        guess = int(a + (usable - said[a]) / slope) if slope > 0 else 2 * max(near)
    elif near:
        grows = sum(known[near[0]].parts.get(part, 0) for part in growing)
        guess = int(near[0] * max(0.0, usable - said[near[0]] + grows) / max(grows, 1))
    else:
        guess = min(known) // 2
    low, high = found.fits or 0, found.fails
    if guess <= low or (high is not None and guess >= high):
        guess = (low + high) // 2 if high is not None else 2 * low
    return max(1, guess)


def rounded_down(number: int) -> int:
    """The number, or up to an eighth less: a multiple of a sixteenth to an eighth of it that is a power of two."""
    step = 1 << max(0, number.bit_length() - 4)
    return max(1, number // step * step)


def meshes(config: ModelConfig, count: int, but: MeshShape) -> Iterator[MeshShape]:
    """The meshes of `count` devices, fsdp × tensor, that divide the model; those that split heads most come first, as
    they take the fewest sequences at a time."""
    for tensor in range(count, 0, -1):
        divides = count % tensor == 0 and config.num_kv_heads % tensor == 0 and config.mlp_width % tensor == 0
        shape = MeshShape(1, count // tensor, tensor)
        if divides and config.width % shape.fsdp == 0 and shape != but:
            yield shape
