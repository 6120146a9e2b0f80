"""Validation: a recipe's figures of each held-out sequence, which do not depend on the mesh."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, reshard
from jaxtyping import Array

from kvjax.mesh import P
from kvjax.models.decoder import Decoder
from kvjax.train.batches import HeldRows, Rows, stack, to_mesh
from kvjax.train.recipe import Recipe, Validation
from kvjax.train.update import TrainState, round_parameters

Validate = Callable[[TrainState, Decoder | None], Validation]


def make_validate(
    recipe: Recipe,
    mesh: Mesh,
    sequences: Sequence[Any],
    dtypes: Any = None,
    held_rows: HeldRows | None = None,
) -> Validate:
    """Return a function that measures a state on the held-out sequences, or on held-out rows of another kind. The
    figures of a sequence do not depend on the mesh. `dtypes`: the dtypes of parameters with master weights
    (`param_dtypes`)."""

    shards = recipe.mesh.batch_shards
    # the default measures the loss, a mean over the batch, so all rows of a batch must be the same sequence
    one_by_one = type(recipe).measure is Recipe.measure

    @jax.jit
    def measure(state: TrainState, model: Decoder | None, batch: Any) -> dict[str, Array]:
        return reshard(recipe.measure(round_parameters(state.params, dtypes), model, batch), P())

    def batches(model: Decoder | None):
        if held_rows is not None:
            rows = Rows.of_this_process(mesh, recipe.rows)
            for count, batch in in_rows(held_rows, recipe.rows):
                yield count, to_mesh(mesh, rows, jax.tree.map(lambda x: x[rows.own], batch))
            return
        rows = Rows.of_this_process(mesh, shards)
        groups = list(by_length(sequences, 1 if one_by_one else shards))
        padded = (stack([group[min(row, len(group) - 1)] for row in rows.own]) for group in groups)
        for group, batch in zip(groups, recipe.batches(padded, model), strict=True):
            yield len(group), to_mesh(mesh, rows, batch)

    def validate(state: TrainState, model: Decoder | None) -> Validation:
        values_by_name: dict[str, list[Any]] = {}
        for count, batch in batches(model):
            for name, values in jax.device_get(measure(state, model, batch)).items():
                values_by_name.setdefault(name, []).extend(values[:count])
        figures = {name: np.stack(values) for name, values in values_by_name.items()}
        numbers = {name: float(x.mean(dtype=np.float64)) for name, x in figures.items() if x.ndim == 1}
        by_sequence = {name: x for name, x in figures.items() if name not in numbers}
        return Validation(
            numbers, by_sequence, len(sequences if held_rows is None else held_rows), recipe.unit
        )

    return validate


def by_length(sequences: Sequence[Any], size: int) -> list[list[Any]]:
    """Return groups of at most `size` sequences of one length. Sequences are arrays [t …] or pytrees of them."""
    groups: dict[int, list[Any]] = {}
    for sequence in sequences:
        groups.setdefault(len(jax.tree.leaves(sequence)[0]), []).append(sequence)
    return [rows[start : start + size] for rows in groups.values() for start in range(0, len(rows), size)]


def in_rows(held_out: HeldRows, rows: int) -> Iterator[tuple[int, Any]]:
    """Yield the held-out rows in batches of `rows`, each with its number of real rows. The last real row is repeated to
    fill the batch."""
    for start in range(0, len(held_out), rows):
        count = min(rows, len(held_out) - start)
        part = held_out[start : start + count]
        yield count, jax.tree.map(lambda x, count=count: x[np.minimum(np.arange(rows), count - 1)], part)
