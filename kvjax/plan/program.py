"""One program, compiled and not run: its bytes on a device by part, its products, what devices exchange."""

import dataclasses
import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.plan.hlo import exchanged
from kvjax.plan.products import flops

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
TEMPORARIES = "temporaries"
"""The part that holds activations and all else between the arguments and the results."""
PADDING = "padding"
"""The part that arguments take more in a device's layout than their numbers do."""


@dataclasses.dataclass(frozen=True)
class Program:
    """What is compiled."""

    function: Callable[..., Any]
    """Already jitted; it is jitted anew, with arguments that it does not read, since they stay in memory, too."""
    arguments: tuple[Any, ...]
    """Trees of `jax.ShapeDtypeStruct` with shardings."""
    parts: Sequence[tuple[str, Any]]
    """A name for each of the arguments' trees, or for a part of one, of which several may have one name."""
    donated: int
    """The argument whose memory is taken over."""
    static: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments that are compiled in."""
    named: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments by name, as `arguments`."""
    steps: int = 1
    """Of which the program takes so many in a loop: figures are of one."""


@dataclasses.dataclass(frozen=True)
class Figures:
    """A program on one device."""

    parts: dict[str, int]
    """Bytes, by name."""
    flops: float
    """Of matrix products outside the attention kernels, in a step."""
    least_bytes: int
    """Arguments read once and results written once: what a step moves at least."""
    collectives: dict[str, dict[str, int]]
    """By kind, how many there are in a step ("count") and the bytes of all ("bytes")."""
    xla: dict[str, float]
    """`flops` and `bytes accessed` of XLA's `cost_analysis`, which counts the body of a loop once."""
    seconds: float
    """That compiling took."""
    refused: str = ""
    """What the compiler said of a program that does not fit; its temporaries are then what it says is needed."""

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


def figures(program: Program, platform: str, limit: int | None = None) -> Figures:
    """The program compiled for the current mesh, whose devices need not be here. `platform`: tpu, cuda or cpu; nothing
    is compiled whose arguments alone are more than `limit` bytes.

    Raises whatever the compiler raises, but where it finds too little memory.
    """
    began = time.monotonic()
    function = jax.jit(
        program.function.__wrapped__,  # pyright: ignore[reportFunctionMemberAccess]
        donate_argnums=program.donated,
        static_argnames=tuple(program.static),
        keep_unused=True,
    )
    parts: dict[str, int] = {}
    for name, tree in program.parts:
        parts[name] = parts.get(name, 0) + held(tree)
    if limit is not None and sum(parts.values()) > limit:
        return Figures(parts, 0.0, 0, {}, {}, 0.0, "its arguments alone are too much")
    traced = function.trace(*program.arguments, **program.named, **program.static)
    try:
        compiled = traced.lower(lowering_platforms=(platform,)).compile()
    except jax.errors.JaxRuntimeError as error:
        needed = too_much(str(error))
        if needed is None:
            raise
        temporaries = max(0, needed - sum(parts.values()))
        seconds = time.monotonic() - began
        return Figures(parts | {TEMPORARIES: temporaries}, 0.0, 0, {}, {}, seconds, one_line(str(error)))
    seconds = time.monotonic() - began
    memory, given = compiled.memory_analysis(), sum(parts.values())
    assert memory is not None
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    parts |= {
        PADDING: memory.argument_size_in_bytes - given,
        TEMPORARIES: memory.temp_size_in_bytes,
        "results": results,
        "program": memory.generated_code_size_in_bytes,
    }
    collectives: dict[str, dict[str, int]] = {}
    for (kind, what), number in sorted(exchanged(compiled.as_text() or "").items()):
        collectives.setdefault(kind, {})[what] = round(number / program.steps)
    cost = compiled.cost_analysis() or {}
    return Figures(
        parts,
        flops(traced.jaxpr.jaxpr) / program.steps,
        memory.argument_size_in_bytes + results,
        collectives,
        {name: float(cost[name]) for name in ("flops", "bytes accessed") if name in cost},
        seconds,
    )


def held(tree: Any) -> int:
    """Bytes of a tree's arrays on one device, without padding."""

    def one(leaf: Any) -> int:
        shape = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding is not None else leaf.shape
        width = 8 if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf.dtype.itemsize
        return math.prod(shape) * width

    return sum(map(one, jax.tree.leaves(tree)))


def too_much(message: str) -> int | None:
    """The bytes that a program needs in all, arguments and results included, by the compiler's refusal, 0 where that
    does not say; None: the message is another's."""
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    # libtpu calls all of it temporaries: a program without any is refused with the sum of what goes in and comes out
    said = re.search(r"Used ([\d.]+)([KMGT]?) of|HLO temporaries \(([\d.]+)([KMGT]?)\)", message)
    if said is None:
        return 0
    number, unit = (said[1], said[2]) if said[1] else (said[3], said[4])
    return int(float(number) * UNITS[unit])


def one_line(message: str) -> str:
    """A message, or its beginning, without line breaks."""
    return " ".join(message.split())[:300]
