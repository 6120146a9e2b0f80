"""Compile a program for chips that need not be here, and find how much of a device's memory it takes.

Compilers for chips that are not here run in their own process, since they print and read the environment when they are
first used. Run as a program, this module reads a job as JSON from its standard input, and prints its memory or a
one-line error as JSON.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from kvjax.errors import UserError, one_line

if TYPE_CHECKING:
    from kvjax.plan.programs import Program

GPU_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""The environment variable with the share of a GPU's memory that JAX takes; 0.75 by default."""
CHIPS = {
    "v5e": int(15.75 * 2**30),
    "v5p": int(95.74 * 2**30),
    "v6e": int(31.25 * 2**30),
    "h100": 84942979072,
}
"""Bytes of each chip that a program may use, according to libtpu's compiler (TPU) and CUDA (GPU)."""
TEMPORARIES = "temporaries"
"""Name of the part of memory that holds activations and other intermediate arrays."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """A number of chips of one kind."""

    text: str
    chip: str
    """One of `CHIPS`."""
    count: int

    @classmethod
    def parse(cls, text: str) -> Topology:
        """Parse a chip and a slice: `v5e:2x4`, `v5p:2x2x1`, `h100:8`. Raises UserError for anything else."""
        name, _, size = text.partition(":")
        if name not in CHIPS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", size):
            raise UserError(
                f"--topology {text}: expected a chip and its slice, such as v5e:2x4, v6e:2x4, v5p:2x2x1 or "
                f"h100:8; known chips are {', '.join(CHIPS)}"
            )
        sizes = [int(number) for number in size.split("x")]
        axes = {"v5p": 3, "h100": 1}.get(name, 2)
        if len(sizes) != axes:
            shape = "x".join("ABC"[:axes])
            raise UserError(f"--topology {text}: {name} has slices of {axes} axes, {name}:{shape}")
        return cls(text, name, math.prod(sizes))

    @property
    def platform(self) -> str:
        """The platform for which programs are lowered."""
        return "cuda" if self.chip == "h100" else "tpu"

    @property
    def usable(self) -> int:
        """Bytes of a chip that a JAX program may use."""
        share = float(os.environ.get(GPU_SHARE, 0.75)) if self.platform == "cuda" else 1.0
        return int(CHIPS[self.chip] * share)

    def check_compiler(self) -> None:
        """Raise UserError if the chip's compiler is not installed."""
        if self.platform == "tpu" and importlib.util.find_spec("libtpu") is None:
            raise UserError(
                f"--topology {self.text}: compiling for a TPU needs libtpu: pip install 'kvjax[tpu]'"
            )
        if self.platform == "cuda":
            from pallas_kernels.ahead import cuda_compiler

            try:
                cuda_compiler()
            except FileNotFoundError as missing:
                raise UserError(
                    f"--topology {self.text}: {missing}: pip install 'kvjax[cuda-compiler]'"
                ) from None

    def devices(self) -> list[Any]:
        """Return the abstract devices of the slice. The process must have the environment
        `pallas_kernels.ahead.ENVIRONMENT`.

        Raises UserError if the compiler does not know the slice.
        """
        from jax.experimental import topologies

        from pallas_kernels.ahead import H100

        options: dict[str, Any] = {"platform": "tpu", "topology_name": self.text}
        if self.count == 1:  # By default a host has four chips.
            options["chips_per_host_bounds"] = [1, 1, 1]
        if self.platform == "cuda":
            options = {"platform": "cuda", "target_config": H100, "topology": f"1x1x{self.count}"}
        try:
            return list(topologies.get_topology_desc(**options).devices)
        except Exception as error:  # The compiler's plugin may raise anything.
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"--topology {self.text}: the compiler knows no such slice ({reason[:200]})"
            ) from None


@dataclasses.dataclass(frozen=True)
class Job:
    """One program to compile."""

    stage: str
    """The program: train, prefill or decode."""
    arguments: tuple[str, ...]
    """The command line of `kvjax.train`, or of `kvjax.plan serve`."""
    length: int
    """Tokens of a training sequence or of a context. Overrides the command line's length."""
    topology: str | None = None
    """The chips, as `Topology.parse` takes them; None: this machine's devices."""

    def __str__(self) -> str:
        return f"{self.stage}, {self.length} tokens, on {self.topology or 'this machine'}"


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory that a program takes on one device."""

    parts: dict[str, int]
    """Bytes by name of the part."""
    refused: str = ""
    """The compiler's message if it refused the program as too large. The total is then the number in the message."""

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    def fits(self, usable: int) -> bool:
        """Return True if the program fits a device with `usable` bytes."""
        return not self.refused and self.total <= usable


def compile_job(job: Job) -> Memory:
    """Compile a job, in this process for this machine's devices, else in a new process.

    Raises UserError if the job is invalid, or if tracing or compiling fails.
    """
    if job.topology is None:
        return compile_here(job)
    from pallas_kernels.ahead import ENVIRONMENT

    process = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(dataclasses.asdict(job)),
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in process.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise UserError(
            f"{job}: the compiler's process {_exit_description(process.returncode, process.stderr)}"
        )
    reply = json.loads(lines[-1])
    if "error" in reply:
        raise UserError(reply["error"])
    return Memory(**reply)


def _exit_description(code: int, stderr: str) -> str:
    """Describe how a process ended that gave no reply, such as out of memory or in a failed check of the compiler."""
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL): this machine may have too little memory to compile it"
    lines = [line for line in stderr.splitlines() if line.strip()] or ["nothing"]
    fatal = (line for line in lines if re.match(r"F\d{4} ", line))
    end = f"ended with {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"{end} and printed: {next(fatal, lines[-1])}"


def compile_here(job: Job) -> Memory:
    """Compile a job in this process. Raises UserError as `compile_job` does."""
    import jax

    from kvjax.mesh import make_mesh
    from kvjax.plan.programs import mesh_of, program_of

    try:
        topology = Topology.parse(job.topology) if job.topology else None
        devices = topology.devices() if topology else None
        mesh = make_mesh(**dataclasses.asdict(mesh_of(job)), devices=devices)
        platform = topology.platform if topology else mesh.devices.flat[0].platform
        with jax.set_mesh(mesh):
            return memory_of(program_of(job, mesh), "cuda" if platform == "gpu" else platform)
    except UserError:
        raise
    except Exception as error:  # Tracing and the compilers may raise anything.
        raise UserError(f"{job}: {type(error).__name__}: {error}") from None


def memory_of(program: Program, platform: str) -> Memory:
    """Compile a program for the current mesh, whose devices may be abstract, and return its memory.

    `platform` is tpu, cuda or cpu. An error that refuses the program as too large is part of the result; others are
    raised.
    """
    import jax

    from kvjax.train.memory import device_bytes_of, refused_bytes

    function = jax.jit(
        program.function.__wrapped__,  # pyright: ignore[reportFunctionMemberAccess]
        donate_argnums=program.donated,
        static_argnames=tuple(program.static),
        keep_unused=True,
    )
    parts = {name: device_bytes_of(tree) for name, tree in program.parts.items()}
    traced = function.trace(*program.arguments, **program.named, **program.static)
    try:
        compiled = traced.lower(lowering_platforms=(platform,)).compile()
    except jax.errors.JaxRuntimeError as error:
        needed = refused_bytes(str(error))
        if needed is None:
            raise
        return Memory(parts | {TEMPORARIES: max(0, needed - sum(parts.values()))}, one_line(str(error)))
    analysis = compiled.memory_analysis()
    assert analysis is not None
    # The device's layout pads the arguments.
    padding = analysis.argument_size_in_bytes - sum(parts.values())
    return Memory(
        parts
        | {
            "padding": padding,
            TEMPORARIES: analysis.temp_size_in_bytes,
            "results": analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
            "program": analysis.generated_code_size_in_bytes,
        }
    )


def main() -> None:
    """Compile the job on standard input and print the reply."""
    fields = json.loads(sys.stdin.read())
    try:
        reply = dataclasses.asdict(compile_here(Job(**(fields | {"arguments": tuple(fields["arguments"])}))))
    except UserError as error:
        reply = {"error": str(error)}
    print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
