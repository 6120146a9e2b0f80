"""The matrix products of a traced program: those in loops as often as the loop runs, each as one device's part of it.
(XLA's own `cost_analysis` counts a loop's body once, and a model's layers are a loop.)"""

import math
from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

KERNELS = "pallas_call"
"""How much those multiply depends on what they are given, and is not counted."""


def flops(program: Jaxpr) -> float:
    """A multiplication and an addition for each; of branches the one with more counts, of loops without a stated
    end one turn."""
    total = 0.0
    for equation in program.eqns:
        name = equation.primitive.name
        if name == "dot_general":
            total += _product(equation)
        elif name == "cond":
            total += max(flops(branch.jaxpr) for branch in equation.params["branches"])
        elif name != KERNELS:
            turns = equation.params["length"] if name == "scan" else 1
            total += turns * sum(map(flops, _inside(equation.params.values())))
    return total


def _inside(values: Any) -> Iterator[Jaxpr]:
    for value in values:
        if isinstance(value, ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, Jaxpr):
            yield value
        elif isinstance(value, tuple | list):
            yield from _inside(value)


def _product(equation: Any) -> float:
    """Of one device: the whole product over the axes of the mesh that its operands are split along. Within a
    `shard_map` shapes are a device's own already."""
    left, right = (x.aval for x in equation.invars)
    (contracted, _), _ = equation.params["dimension_numbers"]
    whole = (
        2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left.shape[axis] for axis in contracted)
    )
    axes: dict[str, int] = {}
    for aval in (left, right):
        for entry in aval.sharding.spec:
            names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
            axes |= {name: aval.sharding.mesh.shape[name] for name in names}
    return whole / math.prod(axes.values())
