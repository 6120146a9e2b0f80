"""`python -m kvjax.plan train|serve|table`: the command."""

import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import Any

from kvjax.command.launch import MeshShape, parse_command, run_command
from kvjax.command.options import find_value
from kvjax.errors import UserError
from kvjax.models.config import ModelConfig
from kvjax.plan import figures
from kvjax.plan.ahead import Job, compiled
from kvjax.plan.chips import Topology
from kvjax.plan.program import TEMPORARIES, Figures
from kvjax.plan.search import fits, largest, meshes
from kvjax.plan.shapes import find_shape, known

NO_SEARCH = "--no-search"
LARGEST_BATCH = 1 << 16
USAGE = """usage: python -m kvjax.plan train --topology v5e:2x4 [--no-search] OPTIONS-OF-kvjax.train
       python -m kvjax.plan serve --topology v5e:2x4 OPTIONS
       python -m kvjax.plan table OPTIONS

Whether training or serving fits: compiled ahead for chips that are not here, from config.json alone.

train takes what kvjax.train takes (--model, --config, --mesh, --method, --lengths, ...). serve and table have a
--help of their own. Models that need no folder: {known}.
Topologies: v5e:2x4, v6e:2x4, v5p:2x2x1 (needs libtpu), h100:8 (needs the extra cuda-compiler)."""


def main(args: list[str] | None = None) -> None:
    """Compile, and say what fits."""
    given = sys.argv[1:] if args is None else args
    commands = {"train": train, "serve": serve, "table": table}
    if not given or given[0] in ("--help", "-h"):
        print(USAGE.format(known=", ".join(known())))
        return
    if given[0] not in commands:
        raise UserError(f"plan: expected {', '.join(commands)}, got {given[0]}; --help says more")
    commands[given[0]](given[1:])


def train(args: list[str]) -> None:
    """The updates of a run: of each phase the longest sequence, then what would fit."""
    from kvjax.plan.training import check_run
    from kvjax.train.config import parse

    told, search = find_value(args, "--topology"), NO_SEARCH not in args
    arguments = tuple(arg for arg in _without(args, "--topology") if arg != NO_SEARCH)
    recipe = parse(arguments)
    if told is None:
        raise UserError(
            "missing: --topology, as --topology v5e:2x4; for this machine: python -m kvjax.train --dry-run"
        )
    model, mesh = find_shape(recipe.model), recipe.mesh
    check_run(recipe, model.config)
    topology = _checked(told, mesh)
    usable, most = topology.chip.usable, model.config.max_position
    _heading(recipe.model, recipe.dtype or model.dtype, topology, mesh)
    phases = recipe.phases()
    for index, phase in enumerate(phases):
        job = Job("train", told, arguments, str(mesh), max(phase.lengths), index)
        which = f", phase {index + 1} of {len(phases)}" if len(phases) > 1 else ""
        _say(f"train, {recipe.method}{which}: an update of {phase.rows} × {job.length} tokens")
        found = compiled(job)
        _say(*figures.table(found, topology.chip, usable))
        if search:
            known = {job.length: found}
            longest = largest(
                functools.partial(_of, job, "length"), known, usable, (TEMPORARIES, "batch"), most
            )
            _say(figures.bracket(longest, "longest sequence", most=most))
            _say(*_meshes(job, found, usable, model.config, mesh))


def serve(args: list[str]) -> None:
    """The call that reads a chunk of the prompts, and a block of decoded tokens, then what would fit."""
    from kvjax.plan.serving import POOL, STAGES, TABLES, ServeConfig, check_policy

    told = parse_command(ServeConfig, args)
    told.check()
    model, mesh = find_shape(told.model), told.mesh
    check_policy(told, model.config)
    topology = _checked(told.topology, mesh)
    usable, most, shards = topology.chip.usable, model.config.max_position, mesh.batch_shards
    batch = -(-told.batch // shards) * shards
    growing = POOL, TABLES, TEMPORARIES, "batch"
    _heading(told.model, told.dtype or model.dtype, topology, mesh)
    for stage in STAGES:
        job = Job(stage, told.topology, tuple(args), str(mesh), told.context, batch=batch)
        what = "a token" if stage == "decode" else "a chunk"
        _say(f"{stage}, {told.policy}: {batch} × {told.context} tokens, a step is {what}")
        found = compiled(job)
        _say(*figures.table(found, topology.chip, usable))
        if told.search:
            contexts = largest(
                functools.partial(_of, job, "length"), {job.length: found}, usable, growing, most
            )
            _say(figures.bracket(contexts, f"longest context, {batch} of them", most=most))
            batches = largest(
                functools.partial(_of, job, "batch"), {batch: found}, usable, growing, LARGEST_BATCH, shards
            )
            _say(figures.bracket(batches, f"largest batch of {job.length} tokens"))
            _say(*_meshes(job, found, usable, model.config, mesh))


def table(args: list[str]) -> None:
    """Many of them, as a table."""
    from kvjax.plan.table import TableConfig, write

    write(parse_command(TableConfig, args))


def _checked(topology: str, mesh: MeshShape) -> Topology:
    """The topology, if the mesh is of it and its compiler is there. Raises UserError."""
    found = Topology.parse(topology)
    if mesh.count != found.count:
        raise UserError(f"--mesh {mesh} has {mesh.count} devices, --topology {topology} has {found.count}")
    found.check_compiler()
    return found


def _heading(model: str, dtype: str, topology: Topology, mesh: MeshShape) -> None:
    chip = topology.chip
    _say(
        f"{model} ({dtype}) on {topology.text}, mesh {mesh}: {topology.count} devices of {figures.size(chip.usable)} "
        f"usable (peak rates: {chip.source})"
    )


def _of(job: Job, field: str, value: Any) -> Figures:
    """The figures of the job with another length, batch or mesh."""
    return compiled(dataclasses.replace(job, **{field: value}))


def _meshes(job: Job, found: Figures, usable: int, model: ModelConfig, mesh: MeshShape) -> list[str]:
    """The mesh that would fit, in a line, if this one does not."""
    if fits(found, usable):
        return []
    others = list(meshes(model, mesh.count, mesh))
    return [figures.other(others, lambda shape: _of(job, "mesh", str(shape)), usable)]


def _say(*lines: str) -> None:
    for line in lines:
        print(line, flush=True)


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
