"""What would fit: the largest number by a few compiles, and other meshes of as many chips."""

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from kvjax.command.launch import MeshShape
from kvjax.models.config import ModelConfig
from kvjax.plan.program import TEMPORARIES, Figures

TRIES = 3
"""Numbers that a search may try."""
NEAR = 1.07
"""What is known to fit and what is known not to are this near when a search is over."""
ENOUGH = 0.8
"""Or what fits takes this share of a device."""
AIM = 0.95
"""The share that a guess is to take, so that it mostly fits: those compile for longest that just do."""


class Count:
    """The compiles of a command, said on stderr one by one before they begin."""

    def __init__(self, most: int):
        self._most, self._begun, self._start = most, 0, time.monotonic()

    def say(self, what: object) -> None:
        """One more begins."""
        self._begun += 1
        passed = time.monotonic() - self._start
        said = f"compile {self._begun} of at most {self._most} ({passed:.0f} s): {what}"
        print(said, file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True)
class Bracket:
    """The largest number that was compiled and fits, and the smallest that does not; None: there was none."""

    fits: int | None
    """The largest that fits."""
    fails: int | None
    """The smallest that does not."""
    total: int = 0
    """Bytes of a device, of the largest that fits."""


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
    """About the largest number, a length or a batch, for which `measure` fits.

    Memory is taken to be a line through the two numbers nearest to the limit, or through one and what does not grow
    with it; what comes of it is compiled, and again, `TRIES` times at most, until what fits takes `ENOUGH` of a device,
    or no larger number means anything. Nothing is compiled where what does not grow is too much already.

    Args:
        known: what was measured before, one number at least; it is added to.
        usable: bytes of a device.
        growing: the parts that grow with the number.
        most: no larger number means anything.
        multiple: of which numbers are.
    """
    most -= most % multiple
    fixed = min(one.total - sum(one.parts.get(part, 0) for part in growing) for one in known.values())
    for _ in range(TRIES if fixed <= usable else 0):
        found = _bracket(known, usable)
        if found.fits and (found.fits >= most or found.total >= ENOUGH * usable):
            break
        if found.fits and found.fails and found.fails <= max(found.fits * NEAR, found.fits + 1):
            break
        guess = _guess(known, int(AIM * usable), growing, found)
        guess = most if guess >= most else max(rounded_down(guess) // multiple, 1) * multiple
        if guess in known:
            break
        known[guess] = measure(guess)
    return _bracket(known, usable)


def _bracket(known: dict[int, Figures], usable: int) -> Bracket:
    good = [number for number, found in known.items() if fits(found, usable)]
    bad = [number for number, found in known.items() if not fits(found, usable)]
    best = max(good, default=None)
    return Bracket(best, min(bad, default=None), known[best].total if best else 0)


def _guess(known: dict[int, Figures], usable: int, growing: tuple[str, ...], found: Bracket) -> int:
    # a refusal does not always say how much is needed
    said = {
        number: one.total for number, one in known.items() if not one.refused or one.parts.get(TEMPORARIES)
    }
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


def meshes(
    config: ModelConfig, count: int, but: MeshShape, lengths: Sequence[int] = (1,)
) -> Iterator[MeshShape]:
    """The meshes of `count` devices that divide the model, fsdp × tensor: those that split heads most come first, as
    they take the fewest sequences at a time. Then fsdp × sequence, where sequences of these lengths can be split."""
    divisors = [parts for parts in range(count, 0, -1) if count % parts == 0]
    shapes = [MeshShape(fsdp=count // parts, tensor=parts) for parts in divisors]
    splits = [parts for parts in divisors[:-1] if not any(length % parts for length in lengths)]
    shapes += [MeshShape(fsdp=count // parts, sequence=parts) for parts in reversed(splits)]
    for shape in shapes:
        heads = config.num_kv_heads, config.mlp_width
        divides = not any(size % shape.head_shards for size in heads) and config.width % shape.fsdp == 0
        if divides and shape != but:
            yield shape
