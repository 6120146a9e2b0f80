"""`python -m kvjax.plan train|serve|table`: the command."""

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from kvjax.command.launch import MeshShape, parse_command, run_command
from kvjax.command.options import find_value
from kvjax.errors import UserError
from kvjax.plan import figures
from kvjax.plan.ahead import Job, compiled
from kvjax.plan.chips import Topology
from kvjax.plan.program import TEMPORARIES, Figures
from kvjax.plan.search import TRIES, Bracket, Count, fits, largest, meshes
from kvjax.plan.shapes import check_longest, find_shape, known

NO_SEARCH = "--no-search"
LARGEST_BATCH = 512
"""Of a part of the mesh that splits batches: larger ones are not looked for."""
USAGE = """usage: python -m kvjax.plan train --topology v5e:2x4 [--no-search] OPTIONS-OF-kvjax.train
       python -m kvjax.plan serve --topology v5e:2x4 OPTIONS
       python -m kvjax.plan table OPTIONS

Whether training or serving fits: compiled ahead for chips that are not here, from config.json alone.

What would fit is looked for by more compiles, at most {tries} for a length or a batch and one for each other mesh, of
half a minute to two minutes each for an 8B (stderr says which is on); --no-search leaves that out.

train takes what kvjax.train takes (--model, --config, --mesh, --method, --lengths, ...). serve and table have a
--help of their own. Models that need no folder: {known}.
Topologies: v5e:2x4, v6e:2x4, v5p:2x2x1 (needs libtpu), h100:8 (needs the extra cuda-compiler)."""


def main(args: list[str] | None = None) -> None:
    """Compile, and say what fits."""
    given = sys.argv[1:] if args is None else args
    commands = {"train": train, "serve": serve, "table": table}
    if not given or given[0] in ("--help", "-h"):
        print(USAGE.format(known=", ".join(known()), tries=TRIES))
        return
    if given[0] not in commands:
        raise UserError(f"plan: expected {', '.join(commands)}, got {given[0]}; --help says more")
    commands[given[0]](given[1:])


def train(args: list[str]) -> None:
    """What a run reads before its updates, if it does; its updates: of each phase the longest sequence, then what would
    fit."""
    from kvjax.plan.targets import STAGES
    from kvjax.plan.training import check_run, split_lengths
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
    most, others = model.config.longest, list(meshes(model.config, mesh.count, mesh, split_lengths(recipe)))
    _heading(recipe.model, recipe.dtype or model.dtype, topology, mesh)
    phases = recipe.phases()
    first, each = tuple(STAGES) if recipe.repeats else (), 1 + (TRIES + len(others) if search else 0)
    programs = Programs(topology, Count(len(first) + len(phases) * each))
    if first:
        check_longest(model.config, recipe.most_tokens)
    for stage in first:
        job = Job(stage, told, arguments, str(mesh), recipe.most_tokens)
        _say(f"{stage}, {recipe.method}: contexts of {job.length} tokens, a step is {STAGES[stage]}")
        programs.shown(job)
    for index, phase in enumerate(phases):
        job = Job("train", told, arguments, str(mesh), max(phase.lengths), index)
        check_longest(model.config, job.length)
        which = f", phase {index + 1} of {len(phases)}" if len(phases) > 1 else ""
        _say(f"train, {recipe.method}{which}: an update of {phase.update_of(job.length)}")
        found = programs.shown(job)
        if search:
            growing = TEMPORARIES, "batch"
            if phase.unit == "sequences":
                longest = programs.largest([job], "length", found, growing, most, mesh.sequence)
                _say(figures.bracket(longest, "longest sequence", most=most))
            _say(*programs.mesh([job], found, others))


def serve(args: list[str]) -> None:
    """The call that reads a chunk of the prompts, the passes of a policy that reads them again, and a block of decoded
    tokens, then what all of them would fit with."""
    from kvjax.plan.serving import POOL, STAGES, TABLES, ServeConfig, stages_of

    told = parse_command(ServeConfig, args)
    told.check()
    model, mesh = find_shape(told.model), told.mesh
    stages = stages_of(told, model.config)
    topology = _checked(told.topology, mesh)
    check_longest(model.config, told.context)
    most, shards = model.config.longest, mesh.batch_shards
    others = list(meshes(model.config, mesh.count, mesh))
    batch = -(-told.batch // shards) * shards
    _heading(told.model, told.dtype or model.dtype, topology, mesh)
    each = 1 + (2 * TRIES + len(others) if told.search else 0)
    programs = Programs(topology, Count(len(stages) * each))
    jobs = [Job(stage, told.topology, tuple(args), str(mesh), told.context, batch=batch) for stage in stages]
    made = []
    for job in jobs:
        _say(f"{job.stage}, {told.policy}: {batch} × {told.context} tokens, a step is {STAGES[job.stage]}")
        made.append(programs.shown(job))
    if told.search:
        found, growing = programs.worst(made), (POOL, TABLES, TEMPORARIES, "batch")
        _say("all of these:" if len(stages) > 2 else "prefill and decode:")
        contexts = programs.largest(jobs, "length", found, growing, most)
        _say(figures.bracket(contexts, f"longest context, {batch} of them", most=most))
        batches = programs.largest(jobs, "batch", found, growing, LARGEST_BATCH * shards, shards)
        _say(figures.bracket(batches, f"largest batch of {told.context} tokens"))
        _say(*programs.mesh(jobs, found, others))


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


@dataclasses.dataclass(frozen=True)
class Programs:
    """What is compiled for a topology."""

    topology: Topology
    """The devices."""
    count: Count
    """Of the compiles."""

    def compiled(self, job: Job) -> Figures:
        """A job's figures, said before they are asked for."""
        self.count.say(job)
        return compiled(job)

    def shown(self, job: Job) -> Figures:
        """The same, with all that there is to say of them."""
        found, chip = self.compiled(job), self.topology.chip
        _say(*figures.table(found, chip, chip.usable))
        return found

    def worst(self, made: Iterable[Figures]) -> Figures:
        """Those that fit least. After the first that do not fit no more are asked for."""
        usable, found = self.topology.chip.usable, []
        for one in made:
            if not fits(one, usable):
                return one
            found.append(one)
        return max(found, key=lambda one: one.total)

    def of(self, jobs: Sequence[Job], **changed: Any) -> Figures:
        """Of the jobs with another length, batch or mesh the worst."""
        return self.worst(self.compiled(dataclasses.replace(job, **changed)) for job in jobs)

    def largest(
        self,
        jobs: Sequence[Job],
        field: str,
        found: Figures,
        growing: tuple[str, ...],
        most: int,
        by: int = 1,
    ) -> Bracket:
        """The largest of a field of the jobs with which all fit."""
        known = {getattr(jobs[0], field): found}
        return largest(
            lambda number: self.of(jobs, **{field: number}),
            known,
            self.topology.chip.usable,
            growing,
            most,
            by,
        )

    def mesh(self, jobs: Sequence[Job], found: Figures, others: Sequence[MeshShape]) -> list[str]:
        """The mesh that would fit, in a line, if this one does not."""
        usable = self.topology.chip.usable
        if fits(found, usable):
            return []
        return [figures.other(others, lambda shape: self.of(jobs, mesh=str(shape), limit=usable), usable)]


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
