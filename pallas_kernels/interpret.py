"""Pallas's interpreters, which run a kernel without its hardware."""

from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.choose import target


def tpu_interpret(interpret: Any = None) -> Any:
    """Return the `interpret` argument of `pallas_call`: the given one, or by default an interpreter unless on a TPU.

    The general interpreter is faster, but does not work inside `shard_map`. TPU's own does not work under
    `jax.checkpoint`.
    """
    if interpret is not None or target().platform == "tpu":
        return interpret or False
    return pltpu.InterpretParams() if jax.sharding.get_abstract_mesh().manual_axes else True


def gpu_interpret(interpret: bool | None = None) -> bool:
    """Return `interpret`, or if None, True unless on a GPU. GPU kernels have only the general interpreter."""
    return target().platform != "gpu" if interpret is None else interpret
