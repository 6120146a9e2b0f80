"""The `--dry-run` of a training: it checks the options against the model's shape and says what would be trained."""

import jax

from kvjax.cli.launch import start_without_devices
from kvjax.models.loading import model_shapes
from kvjax.models.shapes import find_shape
from kvjax.train.data import draw_step_lengths
from kvjax.train.loop import plan
from kvjax.train.recipe import Recipe
from kvjax.train.run import check_shape


def dry_run(recipe: Recipe) -> str:
    """Check a training without weights, data or network, and return a description of what it would train.

    Raises:
        UserError: the options do not fit the model, or the model's shape is not known.
    """
    shape = find_shape(recipe.model, weights=recipe.weights).config
    check_shape(recipe, shape)
    lengths = draw_step_lengths(recipe.steps, recipe.lengths, recipe.shares, recipe.seed)
    tokens = recipe.rows * int(lengths.sum())
    with jax.set_mesh(start_without_devices()):
        params = jax.eval_shape(recipe.init, model_shapes(shape))
    trained = sum(leaf.size for leaf in jax.tree.leaves(params))
    return (
        f"{recipe.method} for {recipe.model}: {shape.num_full_layers} layers × {shape.num_kv_heads} KV heads; weights "
        f"and data ({recipe.data}) were not read\n{plan(recipe, 0, tokens, trained)}"
    )
