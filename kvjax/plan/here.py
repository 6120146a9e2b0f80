"""A training run on this machine's own devices: what it would take, and whether its longest sequences fit."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from kvjax.cache import device_bytes
from kvjax.command.launch import MeshShape, start
from kvjax.errors import UserError
from kvjax.exported.orbax import abstract
from kvjax.mesh import make_mesh
from kvjax.models.decoder import Decoder
from kvjax.plan import figures
from kvjax.plan.chips import CHIPS, Chip
from kvjax.plan.program import TEMPORARIES, Figures, held, too_much
from kvjax.plan.program import figures as compiled
from kvjax.plan.search import TRIES, Count, fits, largest, meshes
from kvjax.plan.shapes import check_longest, find_shape
from kvjax.plan.training import batch_of, check_run, split_lengths, update
from kvjax.train.recipe import Recipe
from kvjax.train.update import Update, first_state

KINDS = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e", "NVIDIA H100": "h100"}
"""What devices call themselves, and the chips that they are; the longest name that fits counts."""


def chip() -> Chip | None:
    """The chip that this machine has, if its rates are known."""
    kind = jax.devices()[0].device_kind
    named = [name for name in KINDS if kind.startswith(name)]
    return CHIPS[KINDS[max(named, key=len)]] if named else None


def dry_run(config: Recipe) -> str:
    """What a run takes of this machine's devices: its programs are compiled, no weights are read and no folder is made.

    Raises:
        UserError: no such model here, devices that are missing, a mesh that does not divide the model.
    """
    model = find_shape(config.model)
    check_run(config, model.config)
    dtype, phases = config.dtype or model.dtype, config.phases()
    start(config.mesh)
    usable = device_bytes()
    others = list(meshes(model.config, config.mesh.count, config.mesh, split_lengths(config)))
    count = Count(len(phases) * (1 + TRIES + len(others)))

    def measure(length: int, index: int, shape: MeshShape = config.mesh, limit: int | None = None) -> Figures:
        count.say(f"an update of {length} tokens, --mesh {shape}")
        mesh = make_mesh(**asdict(shape))
        platform = "cuda" if mesh.devices.flat[0].platform == "gpu" else mesh.devices.flat[0].platform
        with jax.set_mesh(mesh):
            program = update(replace(config, mesh=shape), model.config, dtype, mesh, length, index)
            return compiled(program, platform, limit)

    device = jax.devices()[0]
    lines = [f"{config.model} ({dtype}) on {config.mesh.count} × {device.device_kind}, mesh {config.mesh}"]
    for index, phase in enumerate(phases):
        length, most = max(phase.lengths), model.config.longest
        check_longest(model.config, length)
        which = f", phase {index + 1} of {len(phases)}" if len(phases) > 1 else ""
        lines.append(f"train, {config.method}{which}: an update of {phase.update_of(length)}")
        found = measure(length, index)
        lines += figures.table(found, chip(), usable)
        known = {length: found}
        if phase.unit == "sequences":
            longest = largest(
                lambda length, index=index: measure(length, index),
                *(known, usable, (TEMPORARIES,), most, config.mesh.sequence),
            )
            lines.append(figures.bracket(longest, "longest sequence", most=most))
        if not fits(found, usable):
            lines.append(
                figures.other(others, lambda shape, i=index, n=length: measure(n, i, shape, usable), usable)
            )
    return "\n".join(lines)


def check_memory(
    phases: Sequence[Recipe], updates: Sequence[Update], dtypes: Sequence[Any], mesh: Mesh, model: Decoder
) -> list[int]:
    """Refuse a run whose longest sequence does not fit this machine's devices, in one line with what would (of virtual
    CPU devices, their share of the host's memory). What is compiled here the run does not compile again.

    Returns:
        Bytes of a device that each phase's longest update takes beside model and state; 0 where its batches need the
        weights, so that only the run itself can tell.

    Raises:
        UserError: as said.
    """
    usable, beside = device_bytes(), []
    shapes = jax.tree.map(_shape, model)
    for index, (phase, own) in enumerate(zip(phases, updates, strict=True)):
        read = None if phase.takes_model else shapes
        state = abstract(lambda model, at=index: first_state(phases, dtypes, model, at), mesh, shapes)

        def need(
            length: int, phase: Recipe = phase, own: Any = own, read: Any = read, state: Any = state
        ) -> int:
            arguments = state, read, batch_of(phase, mesh, length, shapes), np.int32(0)
            return _need(own, arguments)

        *shorter, longest = phase.lengths
        try:
            wanted = need(longest)
        except UserError:
            beside.append(0)
            continue
        if wanted <= usable:
            beside.append(wanted - held((state, read)))
            continue
        would = next((length for length in reversed(shorter) if need(length) <= usable), None)
        instead = f"--lengths up to {would} would fit" if would else "none of its lengths fits"
        instead = instead if phase.unit == "sequences" else "a smaller --batch would"
        taken = figures.size(wanted) if wanted < sys.maxsize else "more"
        raise UserError(
            f"an update of {phase.update_of(longest)} takes {taken} of a device that has {figures.size(usable)}: "
            f"on --mesh {phase.mesh} {instead}; --dry-run looks for another mesh"
        )
    return beside


def _shape(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _need(own: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
    """Bytes of a device while the program runs, with what it is given and does not read."""
    given = held(arguments[:-1])
    try:
        memory = own.lower(*arguments).compile().memory_analysis()  # pyright: ignore[reportFunctionMemberAccess]
    except jax.errors.JaxRuntimeError as error:
        needed = too_much(str(error))
        if needed is None:
            raise
        return needed or sys.maxsize  # it need not say how much
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return (
        max(given, memory.argument_size_in_bytes)
        + memory.temp_size_in_bytes
        + results
        + memory.generated_code_size_in_bytes
    )
