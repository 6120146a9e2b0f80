"""Varying mesh axes inside `shard_map`. A loop's first carry must vary over the same axes as its later carries."""

from typing import Any

import jax


def _axes(x: jax.Array) -> frozenset:
    return jax.typeof(x).manual_axis_type.varying


def alike(*arrays: Any) -> Any:
    """Return the pytrees with every array marked as varying over all mesh axes that any of them varies over.

    Nothing is computed or moved. Outside `shard_map` this does nothing.
    """
    union = frozenset().union(*map(_axes, jax.tree.leaves(arrays)))

    def mark(x):
        missing = tuple(sorted(union - _axes(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(mark, arrays)


def output(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> jax.ShapeDtypeStruct:
    """Return the shape of a kernel's output that varies over the same mesh axes as `like`."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type)
