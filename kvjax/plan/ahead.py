"""A compile for chips that are not here, in a process of its own: their compilers print, and read the environment.

Started by itself it reads a job as JSON from its standard input and writes figures, or one line of what is wrong.
"""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from typing import Any

from kvjax.command.launch import MeshShape
from kvjax.errors import UserError
from kvjax.plan.program import Figures, one_line


@dataclasses.dataclass(frozen=True)
class Job:
    """One program on one mesh."""

    stage: str
    """train, read or repeat (of `kvjax.plan.targets`), or one of `kvjax.plan.serving.STAGES`."""
    topology: str
    """As `Topology.parse` takes it."""
    arguments: tuple[str, ...]
    """Of `kvjax.train` for train, read and repeat, else of `kvjax.plan serve`."""
    mesh: str
    """As `MeshShape.parse` takes it."""
    length: int
    """Tokens of a training sequence, a context or a prompt."""
    phase: int = 0
    """Of a training run."""
    batch: int = 1
    """Prompts at a time."""
    limit: int | None = None
    """Bytes of a device: what has more in arguments alone is not compiled."""

    def __str__(self) -> str:
        rows = f"{self.batch} × " if self.stage in ("prefill", "decode") else ""
        return f"{self.stage}, {rows}{self.length} tokens, --mesh {self.mesh} on {self.topology}"


def compiled(job: Job) -> Figures:
    """The figures of a job. Raises UserError for what its process found wrong."""
    from pallas_kernels.ahead import ENVIRONMENT

    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(dataclasses.asdict(job)),
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise UserError(f"{job}: the compiler's process {_end(done.returncode, done.stderr)}")
    answer = json.loads(lines[-1])
    if "wrong" in answer:
        raise UserError(answer["wrong"])
    return Figures(**answer)


def _end(code: int, said: str) -> str:
    """How a process ended that gave no answer: out of memory, or in a compiler's failed check."""
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL): this machine may have too little memory to compile it"
    lines = [line for line in said.splitlines() if line.strip()] or ["nothing"]
    fatal = (line for line in lines if re.match(r"F\d{4} ", line))
    end = f"ended with {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"{end}, and said: {one_line(next(fatal, lines[-1]))}"


def run(job: Job) -> Figures:
    """The same in this process."""
    import jax

    from kvjax.mesh import make_mesh
    from kvjax.plan.chips import Topology
    from kvjax.plan.program import figures

    topology, shape = Topology.parse(job.topology), MeshShape.parse(job.mesh)
    mesh = make_mesh(**dataclasses.asdict(shape), devices=topology.devices())
    with jax.set_mesh(mesh):
        return figures(_program(job, shape, mesh), topology.platform, job.limit)


def _program(job: Job, shape: MeshShape, mesh: Any) -> Any:
    from kvjax.plan.shapes import find_shape
    from kvjax.plan.training import check_mesh

    if job.stage in ("train", "read", "repeat"):
        from kvjax.plan.targets import targets
        from kvjax.plan.training import update
        from kvjax.train.config import parse

        recipe = dataclasses.replace(parse(job.arguments), mesh=shape)
        model = find_shape(recipe.model, job.length)
        check_mesh(shape, model.config)
        dtype = recipe.dtype or model.dtype
        if job.stage != "train":
            return targets(recipe.repeats, model.config, dtype, mesh, job.length, job.stage)
        return update(recipe, model.config, dtype, mesh, job.length, job.phase)

    from kvjax.command.launch import parse_command
    from kvjax.plan.serving import ServeConfig, Serving

    told = parse_command(ServeConfig, job.arguments)
    told = dataclasses.replace(told, mesh=shape, context=job.length, batch=job.batch)
    model = find_shape(told.model, told.context + told.new)
    check_mesh(shape, model.config)
    serving = Serving(told, model.config, told.dtype or model.dtype, mesh)
    return getattr(serving, job.stage)()


def main() -> None:
    told = json.loads(sys.stdin.read())
    job = Job(**(told | {"arguments": tuple(told["arguments"])}))
    try:
        answer: dict[str, Any] = dataclasses.asdict(run(job))
    except UserError as error:
        answer = {"wrong": str(error)}
    except Exception as error:  # whatever tracing and the compilers raise
        answer = {"wrong": f"{job}: {one_line(f'{type(error).__name__}: {error}')}"}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
