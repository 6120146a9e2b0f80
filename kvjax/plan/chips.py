"""Chips and slices of them: memory that programs may use, and peak rates."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any

from kvjax.errors import UserError

GPU_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""The environment variable with the share of a GPU's memory that JAX takes; without it three quarters."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device. Peak rates are the vendors' for dense bfloat16 products."""

    name: str
    """As --topology has it."""
    flops: float
    """A second."""
    bandwidth: float
    """Bytes of the chip's memory a second."""
    memory: int
    """Bytes that a program may use: of a TPU what libtpu's compiler states, of a GPU what CUDA states."""
    source: str
    """Of the rates."""

    @property
    def usable(self) -> int:
        """Bytes that JAX gives a program."""
        if self.name != "h100":
            return self.memory
        return int(self.memory * float(os.environ.get(GPU_SHARE, 0.75)))


CLOUD = "https://cloud.google.com/tpu/docs, the page of each version"
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", 197e12, 819e9, int(15.75 * 2**30), CLOUD),
        Chip("v5p", 459e12, 2765e9, int(95.74 * 2**30), CLOUD),
        Chip("v6e", 918e12, 1638e9, int(31.25 * 2**30), CLOUD),
        Chip("h100", 989e12, 3350e9, 84942979072, "NVIDIA H100 data sheet, SXM, without sparsity"),
    )
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """So many chips of a kind, as the compiler is told of them."""

    text: str
    """As it was given."""
    chip: Chip
    """Each of them."""
    count: int
    """How many."""

    @classmethod
    def parse(cls, text: str) -> Topology:
        """`v5e:2x4`, `v5p:2x2x1`, `h100:8`. Raises UserError for anything else."""
        name, _, size = text.partition(":")
        if name not in CHIPS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", size):
            raise UserError(
                f"--topology {text}: expected a chip and its slice, as v5e:2x4, v6e:2x4, v5p:2x2x1 or "
                f"h100:8; known chips are {', '.join(CHIPS)}"
            )
        sizes = [int(number) for number in size.split("x")]
        axes = {"v5p": 3, "h100": 1}.get(name, 2)
        if len(sizes) != axes:
            shape = "x".join("ABC"[:axes])
            raise UserError(f"--topology {text}: {name} has slices of {axes} axes, {name}:{shape}")
        count = 1
        for number in sizes:
            count *= number
        return cls(text, CHIPS[name], count)

    @property
    def platform(self) -> str:
        """What programs are lowered for."""
        return "cuda" if self.chip.name == "h100" else "tpu"

    def check_compiler(self) -> None:
        """UserError where what compiles for it is not installed."""
        import importlib.util

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
        """The devices that are not here. In a process started for this (`kvjax.plan.ahead`).

        Raises UserError for a slice that the compiler does not know.
        """
        from jax.experimental import topologies

        from pallas_kernels.ahead import H100

        told: dict[str, Any] = {"platform": "tpu", "topology_name": self.text}
        if self.count == 1:  # else a host has four
            told["chips_per_host_bounds"] = [1, 1, 1]
        if self.platform == "cuda":
            told = {"platform": "cuda", "target_config": H100, "topology": f"1x1x{self.count}"}
        try:
            return list(topologies.get_topology_desc(**told).devices)
        except Exception as error:  # whatever the compiler's plugin raises
            why = str(error).strip().splitlines()[0]
            raise UserError(
                f"--topology {self.text}: the compiler knows no such slice ({why[:200]})"
            ) from None
