"""`python -m kvjax.plan train|serve`: the command."""

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence

from kvjax.cli.launch import MeshShape, parse_command, run_command, start
from kvjax.cli.options import find_value
from kvjax.errors import UserError, shown_bytes
from kvjax.models import shapes
from kvjax.models.shapes import ModelShape, find_shape, fit_mesh, warn_if_too_long
from kvjax.plan.ahead import TEMPORARIES, Job, Memory, Topology, compiled

NO_SEARCH = "--no-search"
TRIES = 3
"""Lengths that a search may try."""
NEAR = 1.07
"""The ratio of the shortest length known not to fit to the longest known to fit, at which a search is over."""
ENOUGH = 0.8
"""The share of a device at which a search is over, if a length that fits takes so much."""
AIM = 0.95
"""The share of a device that a guess aims at, so that it mostly fits: programs that just fit compile for longest."""
USAGE = """usage: python -m kvjax.plan train [--topology v5e:2x4] [--no-search] OPTIONS-OF-kvjax.train
       python -m kvjax.plan serve [--topology v5e:2x4] [--no-search] OPTIONS

Says whether training or serving fits a device's memory, from config.json alone: the programs are compiled for
chips that need not be here, or without --topology for this machine's devices.

The longest sequence or context that fits is looked for by at most {tries} more compiles of each program, of half a
minute to two minutes each for an 8B model; --no-search leaves that out.

train takes what kvjax.train takes (--model, --config, --mesh, --method, --lengths, ...). serve has a --help of its
own. Models that need no folder: {known}.
Topologies: v5e:2x4, v6e:2x4, v5p:2x2x1 (needs libtpu), h100:8 (needs the extra cuda-compiler)."""


def main(args: list[str] | None = None) -> None:
    """Compile, and print what fits."""
    given = sys.argv[1:] if args is None else args
    commands = {"train": train, "serve": serve}
    if not given or given[0] in ("--help", "-h"):
        print(USAGE.format(known=", ".join(shapes.known_shapes()), tries=TRIES))
        return
    if given[0] not in commands:
        raise UserError(f"plan: expected {', '.join(commands)}, got {given[0]}; --help says more")
    commands[given[0]](given[1:])


def train(args: list[str]) -> None:
    """Print what the longest update of each phase of a training run takes, then the longest sequence that fits."""
    from kvjax.train.config import parse

    topology = find_value(args, "--topology")
    arguments = tuple(arg for arg in _without(args, "--topology") if arg != NO_SEARCH)
    recipe = parse(arguments)
    model = find_shape(recipe.model, weights=recipe.weights)
    fit_mesh(recipe.mesh, model.config)
    phases = recipe.phases()
    for phase in phases:
        phase.check_model(model.config)
    usable = _begin(recipe.model, model, recipe.dtype, topology, recipe.mesh)
    for index, phase in enumerate(phases):
        job = Job("train", arguments, max(phase.lengths), index, topology)
        warn_if_too_long(model.config, job.length)
        which = f", phase {index + 1} of {len(phases)}" if len(phases) > 1 else ""
        _say(f"train, {recipe.method}{which}: an update of {phase.update_of(job.length)}")
        found = _shown(job, usable)
        if NO_SEARCH not in args and phase.unit == "sequences":
            most, growing = model.config.longest, (TEMPORARIES, "batch")
            known = {job.length: found}
            search(_measure([job], usable), known, usable, growing, most, recipe.mesh.sequence)
            _say(longest(known, usable, "longest sequence", most))


def serve(args: list[str]) -> None:
    """Print what prefill (the call that reads a chunk of the prompts) and decoding (a block of tokens) take, then the
    longest context with which both fit."""
    from kvjax.plan.programs import POOL, TABLES, ServeConfig, check_serving

    told = parse_command(ServeConfig, args)
    model = find_shape(told.model, weights=told.weights, kv_cache_dtype=told.kv_cache_dtype)
    usable = _begin(told.model, model, told.dtype, told.topology, told.mesh)
    check_serving(told, model.config)
    warn_if_too_long(model.config, told.context)
    shards, most = told.mesh.batch_shards, model.config.longest
    batch = -(-told.batch // shards) * shards
    jobs = [Job(stage, tuple(args), told.context, topology=told.topology) for stage in ("prefill", "decode")]
    made = []
    for job in jobs:
        _say(f"{job.stage}, {told.policy}: {batch} × {told.context} tokens")
        made.append(_shown(job, usable))
    if told.search:
        worst = next((one for one in made if not one.fits(usable)), max(made, key=lambda one: one.total))
        known = {told.context: worst}
        search(_measure(jobs, usable), known, usable, (POOL, TABLES, TEMPORARIES, "batch"), most)
        _say("prefill and decode:", longest(known, usable, f"longest context, {batch} of them", most))


def _begin(name: str, model: ModelShape, dtype: str | None, topology: str | None, mesh: MeshShape) -> int:
    """Print what is compiled for, and return a device's usable bytes. Raises UserError for a topology of another size
    than the mesh, or whose compiler is not installed."""
    from kvjax.cache import device_bytes

    if topology is None:
        start(mesh)
        usable = device_bytes()
    else:
        chips = Topology.parse(topology)
        if mesh.count != chips.count:
            raise UserError(
                f"--mesh {mesh} has {mesh.count} devices, --topology {topology} has {chips.count}"
            )
        chips.check_compiler()
        start(MeshShape(), alone=True)
        usable = chips.usable
    where = topology or "this machine"
    stored = {"weights": model.config.weights, "entries": model.config.kv_cache_dtype}
    kinds = [dtype or model.dtype, *(f"{what} {kind}" for what, kind in stored.items() if kind)]
    _say(
        f"{name} ({', '.join(kinds)}) on {where}, mesh {mesh}: {mesh.count} devices of {shown_bytes(usable)} usable"
    )
    return usable


def _compiled(job: Job) -> Memory:
    """Compile a job, and name it on stderr."""
    print(f"compiling {job}", file=sys.stderr, flush=True)
    return compiled(job)


def _shown(job: Job, usable: int) -> Memory:
    """Compile a job, and print its memory and whether that fits."""
    found = _compiled(job)
    _say(*parts(found), verdict(found, usable))
    return found


def _measure(jobs: Sequence[Job], usable: int) -> Callable[[int], Memory]:
    """Return a function of a length: the memory of the job that takes most, or of the first one that does not fit."""

    def measure(length: int) -> Memory:
        found = []
        for job in jobs:
            found.append(_compiled(dataclasses.replace(job, length=length)))
            if not found[-1].fits(usable):
                return found[-1]
        return max(found, key=lambda one: one.total)

    return measure


def search(
    measure: Callable[[int], Memory],
    known: dict[int, Memory],
    usable: int,
    growing: tuple[str, ...],
    most: int,
    multiple: int = 1,
) -> None:
    """Look for the longest length that fits.

    Memory is taken to be a line through the two known lengths nearest to the limit, or through one and what does not
    grow with it. The length on that line is compiled, and again, `TRIES` times at most, until what fits takes `ENOUGH`
    of a device. Nothing is compiled where what does not grow is too much already.

    Args:
        known: memory by length, of one length; what is measured is added.
        usable: bytes of a device.
        growing: the parts that grow with the length.
        most: the longest length that means anything.
        multiple: lengths are multiples of it.
    """
    most -= most % multiple
    fixed = min(one.total - _grown(one, growing) for one in known.values())
    for _ in range(TRIES if fixed <= usable else 0):
        fits, fails = bracket(known, usable)
        if fits and (fits >= most or known[fits].total >= ENOUGH * usable):
            break
        if fits and fails and fails <= max(fits * NEAR, fits + 1):
            break
        guess = _guess(known, AIM * usable, growing)
        if not (fits or 0) < guess < (fails or math.inf):
            guess = ((fits or 0) + fails) // 2 if fails else 2 * max(known)
        guess = most if guess >= most else max(rounded_down(guess) // multiple, 1) * multiple
        if guess in known:
            break
        known[guess] = measure(guess)


def bracket(known: dict[int, Memory], usable: int) -> tuple[int | None, int | None]:
    """Return the longest length that fits and the shortest that does not; None: there is none."""
    good = [length for length, found in known.items() if found.fits(usable)]
    return max(good, default=None), min(known.keys() - good, default=None)


def _guess(known: dict[int, Memory], aim: float, growing: tuple[str, ...]) -> int:
    """Return the length that takes `aim` bytes on the line through the known ones, 0 where no memory is known."""
    # a refusal does not always say how much is needed
    said = {n: one.total for n, one in known.items() if not one.refused or one.parts.get(TEMPORARIES)}
    near = sorted(said, key=lambda length: abs(said[length] - aim))[:2]
    if not near:
        return 0
    a, b = near[0], near[-1]
    slope = _grown(known[a], growing) / a if a == b else (said[b] - said[a]) / (b - a)
    return int(a + (aim - said[a]) / slope) if slope > 0 else 0


def _grown(found: Memory, growing: tuple[str, ...]) -> int:
    return sum(found.parts.get(part, 0) for part in growing)


def rounded_down(number: int) -> int:
    """Return the number, or up to an eighth less, so that few lengths are tried: the largest number of four binary
    digits and zeros behind them that is not above it."""
    step = 1 << max(0, number.bit_length() - 4)
    return max(1, number // step * step)


def parts(found: Memory) -> list[str]:
    """Return a line for each part of a device's memory, and one for all."""
    words = "temporaries, by the compiler's refusal" if found.refused else "activations and other temporaries"
    named = {words if name == TEMPORARIES else name: count for name, count in found.parts.items() if count}
    return [
        f"  {name:<40}{shown_bytes(count):>12}"
        for name, count in (named | {"a device in all": found.total}).items()
    ]


def verdict(found: Memory, usable: int) -> str:
    """Return a line that says whether it fits."""
    if found.fits(usable):
        return f"  fits {shown_bytes(usable)}, with {shown_bytes(usable - found.total)} to spare"
    if found.total <= usable:
        return f"  does not fit {shown_bytes(usable)}: {found.refused}"
    return f"  does not fit {shown_bytes(usable)}: {shown_bytes(found.total - usable)} too much"


def longest(known: dict[int, Memory], usable: int, what: str, most: int) -> str:
    """Return a line with the longest length that fits. `most`: the model's own longest."""
    fits, fails = bracket(known, usable)
    if fits is None:
        return f"  {what}: none that was tried fits, down to {fails}"
    said = f"  {what}: {fits} fits with {shown_bytes(known[fits].total)} a device"
    if fails is not None:
        return f"{said}, {fails} does not"
    return f"{said} (the model's own longest)" if fits == most else said


def _say(*lines: str) -> None:
    for line in lines:
        print(line, flush=True)


def _without(args: Sequence[str], option: str) -> list[str]:
    """Return a command line without an option and its value."""
    kept, skip = [], False
    for arg in args:
        if not skip and arg != option and not arg.startswith(option + "="):
            kept.append(arg)
        skip = not skip and arg == option
    return kept


if __name__ == "__main__":
    run_command(main)
