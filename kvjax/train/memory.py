"""What a run holds of a device's memory, in words."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from kvjax.errors import UserError
from kvjax.models.decoder import Decoder
from kvjax.plan.figures import size
from kvjax.plan.program import held
from kvjax.plan.training import batch_of
from kvjax.train.recipe import Recipe
from kvjax.train.update import TrainState


def device_bytes(recipe: Recipe, update: Any, mesh: Mesh, state: TrainState, model: Decoder | None) -> str:
    """The bytes of a device by part, in one line, and what the longest sequence's update takes beside them: its program
    was compiled to see whether it fits."""
    trees = {
        "weights": model,
        "trained parameters": state.params,
        "optimizer": state.opt,
        "held": state.constants,
    }
    parts = {name: held(tree) for name, tree in trees.items()}
    said = ", ".join(f"{name} {size(number)}" for name, number in parts.items() if number)
    more = _beside(recipe, update, mesh, state, model)
    rest = (
        f"; an update of {recipe.rows} × {max(recipe.lengths)} tokens takes {size(more)} more" if more else ""
    )
    return f"a device holds {size(sum(parts.values()))}: {said}{rest}"


def _beside(recipe: Recipe, update: Any, mesh: Mesh, state: TrainState, model: Decoder | None) -> int:
    """Bytes of the longest sequence's update beside its arguments; 0: its batches need the weights."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), model)
    try:
        batch = batch_of(recipe, mesh, max(recipe.lengths), shapes)
    except UserError:
        return 0
    memory = update.lower(state, model, batch, np.int32(0)).compile().memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.temp_size_in_bytes + results + memory.generated_code_size_in_bytes
