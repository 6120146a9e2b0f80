"""A training run's update, as a program of shapes alone."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from kvjax.command.launch import MeshShape
from kvjax.errors import UserError
from kvjax.exported.orbax import abstract
from kvjax.mesh import BATCH, P
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.models.loading import parameter_dtype
from kvjax.plan.program import Program
from kvjax.train.recipe import Recipe
from kvjax.train.update import first_state, make_update, param_dtypes

WEIGHTS = "weights"


def model_of(mesh: Mesh, config: ModelConfig, dtype: str) -> Decoder:
    """The shapes of a model's weights on a mesh. Raises UserError where the mesh does not divide it."""
    return abstract(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=parameter_dtype(dtype)), mesh)


def check_mesh(mesh: MeshShape, config: ModelConfig) -> None:
    """Refuse a mesh that does not divide the model. Raises UserError."""
    heads = "tensor axis" if mesh.sequence == 1 else "tensor × sequence"
    for what, size, said, parts in (
        ("kv heads", config.num_kv_heads, heads, mesh.head_shards),
        ("mlp width", config.mlp_width, heads, mesh.head_shards),
        ("width", config.width, "fsdp axis", mesh.fsdp),
    ):
        if size % parts:
            raise UserError(
                f"--mesh {mesh}: its {said} of {parts} does not divide the model's {what} ({size})"
            )


def check_run(recipe: Recipe, config: ModelConfig) -> None:
    """Refuse a run that its model or its mesh makes impossible. Raises UserError."""
    check_mesh(recipe.mesh, config)
    for phase in recipe.phases():
        phase.check_model(config)


def split_lengths(recipe: Recipe) -> Sequence[int]:
    """The lengths that a sequence axis must divide: those of sequences, of rows of another kind none that can be."""
    return recipe.lengths if recipe.unit == "sequences" else (1,)


def update(
    recipe: Recipe, config: ModelConfig, dtype: str, mesh: Mesh, length: int, phase: int = 0
) -> Program:
    """The update of one of the run's phases on sequences of `length` tokens, on the current mesh."""
    phases = tuple(recipe.phases())
    model = model_of(mesh, config, dtype)
    dtypes = param_dtypes(phases, model)
    state = abstract(lambda model: first_state(phases, dtypes, model, phase), mesh, model)
    own = phases[phase]
    ends = [0, *itertools.accumulate(each.steps for each in phases)]
    read = None if recipe.takes_model else model
    batch = batch_of(own, mesh, length, model)
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))
    return Program(
        make_update(own, dtypes[phase], before=ends[phase]),
        (state, read, batch, step),
        (
            (WEIGHTS, read),
            ("trained parameters", state.params),
            ("optimizer", state.opt),
            *((("held", state.constants),) if jax.tree.leaves(state.constants) else ()),
            ("batch", (batch, step)),
        ),
        donated=0,
    )


def batch_of(recipe: Recipe, mesh: Mesh, length: int, model: Decoder) -> Any:
    """The shapes of what the recipe makes of an update's sequences, or of its rows of another kind. Raises UserError
    where it needs the weights. `model`: shapes."""

    def place(x: Any) -> jax.ShapeDtypeStruct:
        spec = P(BATCH, *[None] * (x.ndim - 1))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    if (row := recipe.row(model, length)) is not None:
        rows = recipe.rows
        return jax.tree.map(lambda x: place(jax.ShapeDtypeStruct((rows, *x.shape), x.dtype)), row)
    sequences = iter([np.zeros((recipe.rows, length), np.int32)])
    try:
        made = next(recipe.batches(sequences, None if recipe.takes_model else model))
    except Exception as error:  # another package's code, which was given shapes
        raise UserError(
            f"--method {recipe.method}: its batches cannot be planned without the model's weights ({error})"
        ) from None

    return jax.tree.map(place, made)
