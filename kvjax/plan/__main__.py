"""`python -m kvjax.plan train|serve`: estimate whether training or serving fits a device's memory."""

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence

from kvjax.cli.launch import MeshShape, parse_command, run_command, start
from kvjax.cli.options import find_value
from kvjax.errors import UserError, shown_bytes
from kvjax.models import shapes
from kvjax.models.shapes import ModelShape, find_shape, fit_mesh, warn_if_too_long
from kvjax.plan.ahead import TEMPORARIES, Job, Memory, Topology, compile_job

NO_SEARCH = "--no-search"
MAX_TRIES = 3
"""The most lengths that a search compiles."""
CLOSE = 1.07
"""A search ends when the shortest length that does not fit is at most this many times the longest that fits."""
FULL_ENOUGH = 0.8
"""A search ends when a length that fits takes this share of a device."""
TARGET = 0.95
"""The share of a device that the next length should take. It usually fits; programs that barely fit compile slowly."""
USAGE = """usage: python -m kvjax.plan train [--topology v5e:2x4] [--no-search] OPTIONS-OF-kvjax.train
       python -m kvjax.plan serve [--topology v5e:2x4] [--no-search] OPTIONS

Says whether training or serving fits a device's memory, from config.json alone. The programs are compiled for chips
that need not be here or, without --topology, for this machine's devices.

To find the longest sequence or context that fits, each program is compiled up to {tries} more times, which takes half
a minute to two minutes each for an 8B model. --no-search skips this.

train takes the options of kvjax.train (--model, --config, --mesh, --method, --lengths, ...). serve has its own --help.
Models that need no folder: {known}.
Topologies: v5e:2x4, v6e:2x4, v5p:2x2x1 (needs libtpu), h100:8 (needs the extra cuda-compiler)."""


def main(args: list[str] | None = None) -> None:
    """Run the command."""
    arguments = sys.argv[1:] if args is None else args
    commands = {"train": train, "serve": serve}
    if not arguments or arguments[0] in ("--help", "-h"):
        print(USAGE.format(known=", ".join(shapes.known_shapes()), tries=MAX_TRIES))
        return
    if arguments[0] not in commands:
        raise UserError(f"plan: expected {', '.join(commands)}, got {arguments[0]}; --help says more")
    commands[arguments[0]](arguments[1:])


def train(args: list[str]) -> None:
    """Print the memory of the longest update, then the longest sequence that fits."""
    from kvjax.train.config import parse

    topology = find_value(args, "--topology")
    arguments = tuple(arg for arg in _without(args, "--topology") if arg != NO_SEARCH)
    recipe = parse(arguments)
    model = find_shape(recipe.model, weights=recipe.weights)
    fit_mesh(recipe.mesh, model.config)
    recipe.check_model(model.config)
    usable = _start_planning(recipe.model, model, recipe.dtype, topology, recipe.mesh)
    job = Job("train", arguments, max(recipe.lengths), topology)
    warn_if_too_long(model.config, job.length)
    _print_lines(f"train, {recipe.method}: an update of {recipe.update_of(job.length)}")
    memory = _report(job, usable)
    if NO_SEARCH not in args and recipe.unit == "sequences":
        longest_length, growing = model.config.longest, (TEMPORARIES, "batch")
        measured = {job.length: memory}
        search(_measure([job], usable), measured, usable, growing, longest_length, recipe.mesh.sequence)
        _print_lines(longest_line(measured, usable, "longest sequence", longest_length))


def serve(args: list[str]) -> None:
    """Print the memory of prefill (reading one chunk of the prompts) and of decoding (one block of tokens), then the
    longest context with which both fit."""
    from kvjax.plan.programs import POOL, TABLES, ServeConfig, check_serving

    config = parse_command(ServeConfig, args)
    model = find_shape(config.model, weights=config.weights, kv_cache_dtype=config.kv_cache_dtype)
    usable = _start_planning(config.model, model, config.dtype, config.topology, config.mesh)
    check_serving(config, model.config)
    warn_if_too_long(model.config, config.context)
    shards, longest_length = config.mesh.batch_shards, model.config.longest
    batch = -(-config.batch // shards) * shards
    jobs = [
        Job(stage, tuple(args), config.context, topology=config.topology) for stage in ("prefill", "decode")
    ]
    memories = []
    for job in jobs:
        _print_lines(f"{job.stage}, {config.policy}: {batch} × {config.context} tokens")
        memories.append(_report(job, usable))
    if config.search:
        worst = next(
            (memory for memory in memories if not memory.fits(usable)),
            max(memories, key=lambda memory: memory.total),
        )
        measured = {config.context: worst}
        search(_measure(jobs, usable), measured, usable, (POOL, TABLES, TEMPORARIES, "batch"), longest_length)
        _print_lines(
            "prefill and decode:",
            longest_line(measured, usable, f"longest context, {batch} of them", longest_length),
        )


def _start_planning(
    name: str, model: ModelShape, dtype: str | None, topology: str | None, mesh: MeshShape
) -> int:
    """Print the model, the chips and the mesh, and return the usable bytes of a device.

    Raises UserError if the topology's size is not the mesh's, or if its compiler is not installed.
    """
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
    dtypes = [dtype or model.dtype, *(f"{part} {stored[part]}" for part in stored if stored[part])]
    _print_lines(
        f"{name} ({', '.join(dtypes)}) on {where}, mesh {mesh}: {mesh.count} devices of {shown_bytes(usable)} usable"
    )
    return usable


def _compile(job: Job) -> Memory:
    """Print a job to stderr and compile it."""
    print(f"compiling {job}", file=sys.stderr, flush=True)
    return compile_job(job)


def _report(job: Job, usable: int) -> Memory:
    """Compile a job, and print its memory and whether it fits."""
    memory = _compile(job)
    _print_lines(*parts(memory), verdict(memory, usable))
    return memory


def _measure(jobs: Sequence[Job], usable: int) -> Callable[[int], Memory]:
    """Return a function that compiles the jobs at a length, up to the first that does not fit, and returns the largest
    memory."""

    def measure(length: int) -> Memory:
        memories = []
        for job in jobs:
            memories.append(_compile(dataclasses.replace(job, length=length)))
            if not memories[-1].fits(usable):
                return memories[-1]
        return max(memories, key=lambda memory: memory.total)

    return measure


def search(
    measure: Callable[[int], Memory],
    measured: dict[int, Memory],
    usable: int,
    growing: tuple[str, ...],
    longest_length: int,
    multiple: int = 1,
) -> None:
    """Search for the longest length that fits.

    Memory is assumed to be linear in the length: a line through the two measured lengths nearest to the limit, or
    through one length and the memory that does not grow. The length that this line gives is compiled, at most
    `MAX_TRIES` times, until one that fits takes `FULL_ENOUGH` of a device. Nothing is compiled if the memory that does
    not grow already exceeds the device.

    Args:
        measure: returns the memory at a length.
        measured: memory by length; it holds at least one length, and measured ones are added.
        usable: bytes of a device.
        growing: names of the parts that grow with the length.
        longest_length: no longer length is tried.
        multiple: lengths that are tried are multiples of it.
    """
    longest_length -= longest_length % multiple
    fixed = min(memory.total - _growing_bytes(memory, growing) for memory in measured.values())
    for _ in range(MAX_TRIES if fixed <= usable else 0):
        fits, fails = bracket(measured, usable)
        if fits and (fits >= longest_length or measured[fits].total >= FULL_ENOUGH * usable):
            break
        if fits and fails and fails <= max(fits * CLOSE, fits + 1):
            break
        guess = _guess(measured, TARGET * usable, growing)
        if not (fits or 0) < guess < (fails or math.inf):
            guess = ((fits or 0) + fails) // 2 if fails else 2 * max(measured)
        guess = (
            longest_length if guess >= longest_length else max(rounded_down(guess) // multiple, 1) * multiple
        )
        if guess in measured:
            break
        measured[guess] = measure(guess)


def bracket(measured: dict[int, Memory], usable: int) -> tuple[int | None, int | None]:
    """Return the longest measured length that fits and the shortest that does not; None if there is none."""
    fitting = [length for length, memory in measured.items() if memory.fits(usable)]
    return max(fitting, default=None), min(measured.keys() - fitting, default=None)


def _guess(measured: dict[int, Memory], target: float, growing: tuple[str, ...]) -> int:
    """Return the length that takes `target` bytes by linear extrapolation; 0 if no memory is known."""
    # A refusal does not always say how much memory is needed.
    totals = {
        length: memory.total
        for length, memory in measured.items()
        if not memory.refused or memory.parts.get(TEMPORARIES)
    }
    nearest = sorted(totals, key=lambda length: abs(totals[length] - target))[:2]
    if not nearest:
        return 0
    a, b = nearest[0], nearest[-1]
    slope = _growing_bytes(measured[a], growing) / a if a == b else (totals[b] - totals[a]) / (b - a)
    return int(a + (target - totals[a]) / slope) if slope > 0 else 0


def _growing_bytes(memory: Memory, growing: tuple[str, ...]) -> int:
    return sum(memory.parts.get(part, 0) for part in growing)


def rounded_down(number: int) -> int:
    """Return `number` rounded down to four significant bits, so that searches try few different lengths."""
    step = 1 << max(0, number.bit_length() - 4)
    return max(1, number // step * step)


def parts(memory: Memory) -> list[str]:
    """Return a line for each part of a device's memory, and one for the total."""
    label = (
        "temporaries, by the compiler's refusal" if memory.refused else "activations and other temporaries"
    )
    labelled = {
        label if name == TEMPORARIES else name: count for name, count in memory.parts.items() if count
    }
    return [
        f"  {name:<40}{shown_bytes(count):>12}"
        for name, count in (labelled | {"a device in all": memory.total}).items()
    ]


def verdict(memory: Memory, usable: int) -> str:
    """Return a line that says whether a program fits."""
    if memory.fits(usable):
        return f"  fits {shown_bytes(usable)}, with {shown_bytes(usable - memory.total)} to spare"
    if memory.total <= usable:
        return f"  does not fit {shown_bytes(usable)}: {memory.refused}"
    return f"  does not fit {shown_bytes(usable)}: {shown_bytes(memory.total - usable)} too much"


def longest_line(measured: dict[int, Memory], usable: int, label: str, longest_length: int) -> str:
    """Return a line with the longest length that fits. `longest_length`: the longest length of the model."""
    fits, fails = bracket(measured, usable)
    if fits is None:
        return f"  {label}: nothing fits, down to {fails}"
    line = f"  {label}: {fits} fits with {shown_bytes(measured[fits].total)} a device"
    if fails is not None:
        return f"{line}, {fails} does not"
    return f"{line} (the model's own longest)" if fits == longest_length else line


def _print_lines(*lines: str) -> None:
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
