"""`python -m kvjax.plan train|serve|table`: the command."""

import dataclasses
import sys
from collections.abc import Callable, Sequence

from kvjax.command.launch import MeshShape, parse_command, run_command
from kvjax.command.options import find_value
from kvjax.errors import UserError

USAGE = """usage: python -m kvjax.plan train --topology v5e:2x4 [--no-search] OPTIONS-OF-kvjax.train
       python -m kvjax.plan serve --topology v5e:2x4 OPTIONS
       python -m kvjax.plan table OPTIONS

Whether training or serving fits: compiled ahead for chips that are not here, from config.json alone.

train takes what kvjax.train takes (--model, --config, --mesh, --method, --lengths, ...). serve and table have a
--help of their own. Models that need no folder: {known}.
Topologies: v5e:2x4, v6e:2x4, v5p:2x2x1, v4:2x2x1 (needs libtpu), h100:8 (needs the extra cuda-compiler)."""


def main(args: list[str] | None = None) -> None:
    """Compile, and say what fits."""
    given = sys.argv[1:] if args is None else args
    commands = {"train": train, "serve": serve, "table": table}
    if not given or given[0] in ("--help", "-h"):
        from kvjax.plan.shapes import known

        print(USAGE.format(known=", ".join(known())))
        return
    if given[0] not in commands:
        raise UserError(f"plan: expected {', '.join(commands)}, got {given[0]}; --help says more")
    commands[given[0]](given[1:])


def train(args: list[str]) -> None:
    """The updates of a run: of each phase the longest sequence, then what would fit."""
    told, rest, search = find_value(args, "--topology"), _without(args, "--topology"), "--no-search" not in args
    arguments = tuple(arg for arg in rest if arg != "--no-search")
    from kvjax.train.config import parse

    recipe = parse(arguments)
    if told is None:
        raise UserError("missing: --topology, as --topology v5e:2x4; for this machine: python -m kvjax.train --dry-run")

    from kvjax.plan import figures
    from kvjax.plan.ahead import Job, compiled
    from kvjax.plan.chips import Topology
    from kvjax.plan.program import TEMPORARIES, Figures
    from kvjax.plan.search import fits, largest, meshes
    from kvjax.plan.shapes import find_shape
    from kvjax.plan.training import check_run

    topology = Topology.parse(told)
    _check_count(topology.text, topology.count, recipe.mesh)
    model = find_shape(recipe.model)
    check_run(recipe, model.config)
    topology.check_compiler()
    usable = topology.chip.usable
    phases = recipe.phases()
    print(_heading(recipe.model, recipe.dtype or model.dtype, topology, recipe.mesh))
    for index, phase in enumerate(phases):
        length = max(phase.lengths)
        job = Job("train", topology.text, arguments, str(recipe.mesh), length, index)

        def measure(length: int, job: Job = job) -> Figures:
            return compiled(dataclasses.replace(job, length=length))

        which = f", phase {index + 1} of {len(phases)}" if len(phases) > 1 else ""
        print(f"train, {recipe.method}{which}: an update of {phase.rows} × {length} tokens", flush=True)
        known = {length: measure(length)}
        _say(figures.table(known[length], topology.chip, usable))
        if not search:
            continue
        found = largest(measure, known, usable, (TEMPORARIES, "batch"), most=model.config.max_position)
        _say([figures.bracket(found, "longest sequence", most=model.config.max_position)])
        if not fits(known[length], usable):
            again = lambda mesh, job=job: compiled(dataclasses.replace(job, mesh=str(mesh)))  # noqa: E731
            _say([_other(list(meshes(model.config, recipe.mesh.count, recipe.mesh)), again, usable)])


def serve(args: list[str]) -> None:
    """The call that reads a chunk of the prompts, and a block of decoded tokens, then what would fit."""
    from kvjax.plan.serving import POOL, STAGES, ServeConfig, check_policy

    told = parse_command(ServeConfig, args)
    told.check()

    from kvjax.plan import figures
    from kvjax.plan.ahead import Job, compiled
    from kvjax.plan.chips import Topology
    from kvjax.plan.program import TEMPORARIES, Figures
    from kvjax.plan.search import fits, largest, meshes
    from kvjax.plan.shapes import find_shape

    topology = Topology.parse(told.topology)
    _check_count(topology.text, topology.count, told.mesh)
    model = find_shape(told.model)
    check_policy(told, model.config)
    topology.check_compiler()
    usable = topology.chip.usable
    shards = told.mesh.batch_shards
    batch = -(-told.batch // shards) * shards
    print(_heading(told.model, told.dtype or model.dtype, topology, told.mesh))
    growing = POOL, "page tables and states", TEMPORARIES, "batch"
    for stage in STAGES:
        job = Job(stage, topology.text, tuple(args), str(told.mesh), told.context, batch=batch)
        what = "of a token" if stage == "decode" else "of a chunk"
        print(f"{stage}, {told.policy}: {batch} × {told.context} tokens, figures {what}", flush=True)
        found = compiled(job)
        _say(figures.table(found, topology.chip, usable))
        if not told.search:
            continue

        def longer(context: int, job: Job = job) -> Figures:
            return compiled(dataclasses.replace(job, length=context))

        def wider(count: int, job: Job = job) -> Figures:
            return compiled(dataclasses.replace(job, batch=count * shards))

        most = model.config.max_position
        _say([figures.bracket(largest(longer, {told.context: found}, usable, growing, most), "longest context", most=most)])
        each = largest(wider, {batch // shards: found}, usable, growing, 1 << 16)
        times = f" (times {shards}: the mesh splits a batch)" if shards > 1 else ""
        _say([figures.bracket(each, f"largest batch{times}", most=0)])
        if not fits(found, usable):
            again = lambda mesh, job=job: compiled(dataclasses.replace(job, mesh=str(mesh)))  # noqa: E731
            _say([_other(list(meshes(model.config, told.mesh.count, told.mesh)), again, usable)])


def table(args: list[str]) -> None:
    """Many of them, as a table."""
    from kvjax.plan.table import TableConfig, write

    write(parse_command(TableConfig, args))


def _heading(model: str, dtype: str, topology: "Topology", mesh: MeshShape) -> str:  # noqa: F821 # pyright: ignore
    from kvjax.plan.figures import size

    chip = topology.chip
    return (
        f"{model} ({dtype}) on {topology.text}, mesh {mesh}: {topology.count} devices of {size(chip.usable)} usable "
        f"(rates: {chip.source})"
    )


def _check_count(topology: str, count: int, mesh: MeshShape) -> None:
    if mesh.count != count:
        raise UserError(f"--mesh {mesh} has {mesh.count} devices, --topology {topology} has {count}")


def _other(shapes: Sequence[MeshShape], measure: Callable[[MeshShape], "Figures"], usable: int) -> str:  # noqa: F821 # pyright: ignore
    """The first of the meshes that fits."""
    from kvjax.plan.figures import size
    from kvjax.plan.search import fits

    for shape in shapes:
        found = measure(shape)
        if fits(found, usable):
            return f"  another mesh: --mesh {shape} fits, with {size(found.total)} a device"
    return f"  no other mesh of as many devices fits: {', '.join(map(str, shapes)) or 'none divides the model'}"


def _say(lines: Sequence[str]) -> None:
    print("\n".join(lines), flush=True)


def _without(args: Sequence[str], option: str) -> list[str]:
    """A command line without an option and its value."""
    kept, skip = [], False
    for arg in args:
        if not skip and arg != option and not arg.startswith(option + "="):
            kept.append(arg)
        skip = not skip and arg == option
    return kept


if __name__ == "__main__":
    run_command(main)
