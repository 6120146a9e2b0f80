"""Memory of a device during a training run: the check before its first update, and its description."""

import math
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from kvjax.cache import device_bytes
from kvjax.checkpoints.orbax import abstract
from kvjax.errors import UserError, shown_bytes
from kvjax.mesh import BATCH, P
from kvjax.models.decoder import Decoder
from kvjax.train.recipe import Recipe
from kvjax.train.update import TrainState, Update, initial_state

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def check(recipe: Recipe, update: Update, mesh: Mesh, model: Decoder) -> int:
    """Check that the longest sequence of a run fits this machine's devices. A virtual CPU device has its share of the
    host's memory. The run reuses the programs that are compiled here.

    Returns:
        the bytes per device that the longest update takes in addition to model and state; 0 if its batches cannot be
        planned without the weights.

    Raises:
        UserError: the longest sequence does not fit. The message names one that would.
    """
    usable = device_bytes()
    shapes = jax.tree.map(_shape, model)
    loaded = None if recipe.takes_model else shapes
    state = abstract(lambda model: initial_state(recipe, model), mesh, shapes)

    def need(length: int) -> int:
        return _program_bytes(update, (state, loaded, batch_of(recipe, mesh, length, shapes), np.int32(0)))

    *shorter, longest = recipe.lengths
    try:
        needed = need(longest)
    except UserError:
        return 0
    if needed <= usable:
        return needed - device_bytes_of(state, loaded)
    fitting = next((length for length in reversed(shorter) if need(length) <= usable), None)
    remedy = f"--lengths up to {fitting} would fit" if fitting else "none of its lengths fits"
    remedy = remedy if recipe.unit == "sequences" else "a smaller --batch would"
    size = shown_bytes(needed) if needed < sys.maxsize else "more"
    raise UserError(
        f"an update of {recipe.update_of(longest)} takes {size} of a device that has {shown_bytes(usable)}: "
        f"on --mesh {recipe.mesh} {remedy}"
    )


def describe(recipe: Recipe, state: TrainState, model: Decoder | None, extra: int) -> str:
    """Return a line with the bytes per device of each part. `extra`: the bytes that the update of the longest sequence
    takes in addition (`check`); 0: not known."""
    trees = {"weights": model, "trained parameters": state.params, "optimizer": state.opt}
    parts = {name: device_bytes_of(tree) for name, tree in trees.items()}
    listed = ", ".join(f"{name} {shown_bytes(number)}" for name, number in parts.items() if number)
    longest = f"; an update of {recipe.update_of(max(recipe.lengths))} takes {shown_bytes(extra)} more"
    return f"a device holds {shown_bytes(sum(parts.values()))}: {listed}{longest if extra else ''}"


def batch_of(recipe: Recipe, mesh: Mesh, length: int, model: Decoder) -> Any:
    """Return the shapes of the recipe's batch of an update. `model`: a model with shapes for arrays. Raises UserError
    if the batch's shapes depend on the weights."""

    def place(x: Any) -> jax.ShapeDtypeStruct:
        spec = P(BATCH, *[None] * (x.ndim - 1))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    if (row := recipe.row(model, length)) is not None:
        rows = recipe.rows
        return jax.tree.map(lambda x: place(jax.ShapeDtypeStruct((rows, *x.shape), x.dtype)), row)
    sequences = iter([np.zeros((recipe.rows, length), np.int32)])
    try:
        batch = next(recipe.batches(sequences, None if recipe.takes_model else model))
    except Exception as error:  # code of another package, which got shapes instead of arrays
        raise UserError(
            f"--method {recipe.method}: its batches cannot be planned without the model's weights ({error})"
        ) from None

    return jax.tree.map(place, batch)


def device_bytes_of(*trees: Any) -> int:
    """Return the bytes of arrays on one device, without padding."""

    def leaf_bytes(leaf: Any) -> int:
        shape = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding is not None else leaf.shape
        width = 8 if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf.dtype.itemsize
        return math.prod(shape) * width

    return sum(map(leaf_bytes, jax.tree.leaves(trees)))


def refused_bytes(message: str) -> int | None:
    """Return the bytes that a program needs, arguments and results included, from the compiler's error message; 0 if
    the message does not say, None if it is another error."""
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    # libtpu counts inputs and outputs as temporaries, too
    match = re.search(r"Used ([\d.]+)([KMGT]?) of|HLO temporaries \(([\d.]+)([KMGT]?)\)", message)
    if match is None:
        return 0
    number, unit = (match[1], match[2]) if match[1] else (match[3], match[4])
    return int(float(number) * UNITS[unit])


def _shape(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _program_bytes(update: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
    """Return the bytes per device while the program runs, including arguments that it does not read."""
    held_bytes = device_bytes_of(arguments[:-1])
    try:
        memory = update.lower(*arguments).compile().memory_analysis()  # pyright: ignore[reportFunctionMemberAccess]
    except jax.errors.JaxRuntimeError as error:
        needed = refused_bytes(str(error))
        if needed is None:
            raise
        return needed or sys.maxsize  # 0: the message does not say how much
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return (
        max(held_bytes, memory.argument_size_in_bytes)
        + memory.temp_size_in_bytes
        + results
        + memory.generated_code_size_in_bytes
    )
