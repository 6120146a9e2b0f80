"""What is said of a program and of what would fit, in words."""

from collections.abc import Callable, Sequence

from kvjax.command.launch import MeshShape
from kvjax.plan.chips import Chip
from kvjax.plan.program import TEMPORARIES, Figures
from kvjax.plan.search import Bracket, fits


def size(number: int | float) -> str:
    """Bytes with a unit."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(number) >= unit:
            return f"{number / unit:.2f} {name}"
    return f"{number:.0f} B"


def parts(found: Figures) -> list[str]:
    """A line for each part of a device's memory, and one for all."""
    shown = {name: number for name, number in found.parts.items() if number}
    lines = [f"  {_words(name, found):<40}{size(number):>12}" for name, number in shown.items()]
    return [*lines, f"  {'a device in all':<40}{size(found.total):>12}"]


def _words(name: str, found: Figures) -> str:
    if name != TEMPORARIES:
        return name
    return "temporaries, by the compiler's refusal" if found.refused else "activations and other temporaries"


def exchanges(found: Figures) -> str:
    """The collectives of a step."""
    if not found.collectives:
        return "  devices exchange nothing"
    said = [
        f"{one['count']} {kind} of {size(one['bytes'])} in all" for kind, one in found.collectives.items()
    ]
    return f"  exchanged in a step: {', '.join(said)}"


def step(found: Figures, chip: Chip | None) -> str:
    """A step's products and bytes, and the time that it cannot be faster than on the chip."""
    said = (
        f"  a step: {number(found.flops)}FLOP of matrix products beside the attention kernels, "
        f"{size(found.least_bytes)} read or written at least"
    )
    if chip is None:
        return said
    compute, memory = found.flops / chip.flops, found.least_bytes / chip.bandwidth
    limit = "products" if compute > memory else "memory"
    return (
        f"{said}: {duration(max(compute, memory))} or more ({limit}; {chip.name}: {number(chip.flops)}FLOP/s, "
        f"{number(chip.bandwidth)}B/s)"
    )


def cost(found: Figures) -> list[str]:
    """What XLA's own analysis says, if it says anything (for CUDA it does not)."""
    said = ", ".join(f"{name} {number(value)}" for name, value in found.xla.items())
    return [f"  XLA's cost_analysis, a loop's body counted once: {said}"] if said else []


def number(value: int | float) -> str:
    """With a decimal prefix."""
    for exponent, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 10**exponent:
            return f"{value / 10**exponent:.3g} {prefix}"
    return f"{value:.3g} "


def duration(seconds: int | float) -> str:
    """With a unit."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def verdict(found: Figures, usable: int) -> str:
    """Whether it fits."""
    if fits(found, usable):
        return f"  fits {size(usable)}, with {size(usable - found.total)} to spare"
    if found.total <= usable:
        return f"  does not fit {size(usable)}: {found.refused}"
    return f"  does not fit {size(usable)}: {size(found.total - usable)} too much"


def bracket(found: Bracket, what: str, *, most: int | None = None) -> str:
    """The largest that fits."""
    if found.fits is None:
        return f"  {what}: none that was tried fits, down to {found.fails}"
    said = f"  {what}: {found.fits} fits with {size(found.total)} a device"
    if found.fails is None:
        return said + (" (the model's own longest)" if found.fits == most else "")
    return f"{said}, {found.fails} does not"


def other(shapes: Sequence[MeshShape], measure: Callable[[MeshShape], Figures], usable: int) -> str:
    """The first of the meshes that fits."""
    for shape in shapes:
        found = measure(shape)
        if fits(found, usable):
            return f"  another mesh: --mesh {shape} fits, with {size(found.total)} a device"
    return (
        f"  no other mesh of as many devices fits: {', '.join(map(str, shapes)) or 'none divides the model'}"
    )


def table(found: Figures, chip: Chip | None, usable: int) -> list[str]:
    """All that is said of one program."""
    lines = parts(found)
    if not found.refused:
        lines += [exchanges(found), step(found, chip), *cost(found)]
    return [*lines, verdict(found, usable)]
