"""What a run holds of a device's memory, in words."""

from kvjax.models.decoder import Decoder
from kvjax.plan.figures import size
from kvjax.plan.program import held
from kvjax.train.recipe import Recipe
from kvjax.train.update import TrainState


def device_bytes(recipe: Recipe, state: TrainState, model: Decoder | None, beside: int) -> str:
    """The bytes of a device by part, in one line, and those that the longest sequence's update takes beside them, from
    `kvjax.plan.here.check_memory` (0: not known)."""
    trees = {
        "weights": model,
        "trained parameters": state.params,
        "optimizer": state.opt,
        "held": state.constants,
    }
    parts = {name: held(tree) for name, tree in trees.items()}
    said = ", ".join(f"{name} {size(number)}" for name, number in parts.items() if number)
    longest = f"; an update of {recipe.update_of(max(recipe.lengths))} takes {size(beside)} more"
    return f"a device holds {size(sum(parts.values()))}: {said}{longest if beside else ''}"
