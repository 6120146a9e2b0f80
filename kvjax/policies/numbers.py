"""Checked NumPy arrays of a method's own numbers. Once they are placed on a mesh, compiled programs take them."""

import math
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

from kvjax.errors import LARGEST_INT, UserError, real_number, shown, whole_number
from kvjax.mesh import mesh_of

NO_TABLE: np.ndarray = np.zeros(0)
EXACT: dict[str, Any] = {"precision": jax.lax.Precision.HIGHEST, "preferred_element_type": np.float32}
"""Options of exact products: sums are float32, and float32 factors are not rounded."""


def uniform_parameter(rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int, spec: P) -> nnx.Param:
    """Return a float32 parameter drawn from U(±1/√fan_in), as torch initialises linear layers and convolutions."""
    bound = 1 / math.sqrt(fan_in)
    return nnx.Param(jax.random.uniform(rngs.params(), shape, minval=-bound, maxval=bound, out_sharding=spec))


def is_placed(value: Any) -> bool:
    """Return True if the value is on a mesh already, or traced in a compiled program, so that it was checked before."""
    if isinstance(value, Tracer):
        return True
    return isinstance(value, jax.Array) and value.ndim > 0 and mesh_of(value) is not None


def whole_array(where: str, name: str, value: Any, least: int = 1, most: int = LARGEST_INT) -> Any:
    """Return `whole_number` as an int32 array. A placed value is returned as it is."""
    return value if is_placed(value) else np.array(whole_number(where, name, value, least, most), np.int32)


def real_array(where: str, name: str, value: Any, *limits: float, above: float = -np.inf) -> Any:
    """Return `real_number` as a float32 array. A placed value is returned as it is."""
    if is_placed(value):
        return value
    return np.array(real_number(where, name, value, *limits, above=above), np.float32)


def head_table(
    where: str,
    name: str,
    value: Any,
    layers: int | None = None,
    kv_heads: int | None = None,
    *,
    shares: bool = True,
) -> Float[np.ndarray, "l k"]:
    """Return `value` as a table of layers × kv heads. Raises UserError unless its numbers are finite, and from 0 to 1
    with `shares`. If `layers` and `kv_heads` are given, the table must have this shape."""
    try:
        given = np.asarray(value)
        table = given.astype(np.float64) if given.dtype.kind not in "SU" else NO_TABLE
    except (TypeError, ValueError):
        table = NO_TABLE
    outside = ~np.isfinite(table) | (shares & ((table < 0) | (table > 1)))
    if table.ndim != 2 or table.size == 0 or outside.any():
        numbers = "numbers from 0 to 1" if shares else "finite numbers"
        raise UserError(
            f"{where}: {name} must be a table of {numbers}, layers × kv heads, got {shown(value)}"
        )
    expected = tuple(required or size for required, size in zip((layers, kv_heads), table.shape, strict=True))
    if table.shape != expected:
        made_for = f"made for {table.shape[0]} layers × {table.shape[1]} kv heads"
        raise UserError(f"{where}: {name} {made_for}, the model has {expected[0]} × {expected[1]}")
    return table
