"""One update: parameters and the optimizer's state in, the next ones and the numbers to log out."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import reshard

from kvjax.mesh import BATCH, P
from kvjax.models.decoder import Decoder
from kvjax.struct import struct
from kvjax.train.checkpoints import all_finite
from kvjax.train.metrics import FINITE, LINE
from kvjax.train.recipe import Recipe

MASTER = jnp.float32
"""What 16-bit parameters are kept in between updates, if they are."""


@struct
class TrainState:
    """All that changes while training, split over the mesh as the parameters are."""

    params: Any
    """The recipe's; with master weights in float32."""
    opt: Any
    """optax's."""
    constants: Any = None
    """What a later phase holds of the one before; no update changes it."""


def initial_state(recipe: Recipe, model: Decoder) -> TrainState:
    """The state before the first update. To be jitted under a mesh."""
    params = _masters(recipe, recipe.init(model))
    return TrainState(params, recipe.optimizer().init(params))


def enter(recipe: Recipe, before: Any, dtypes: Any = None) -> TrainState:
    """The first state of a later phase, from the parameters of the one before and, where these are master weights,
    their `dtypes`: what is trained goes on from them, what is held is rounded. To be jitted under a mesh."""
    params = _masters(recipe, recipe.enter(before)[0])
    constants = recipe.enter(round_parameters(before, dtypes))[1]
    return TrainState(params, recipe.optimizer().init(params), constants)


def first_state(phases: Sequence[Recipe], dtypes: Sequence[Any], model: Decoder, phase: int) -> TrainState:
    """A state of the structure and shardings that a phase's have; of the first, the one before any update. `dtypes`: of
    each phase (`param_dtypes`). To be jitted under a mesh."""
    state = initial_state(phases[0], model)
    for later, before in zip(phases[1 : phase + 1], dtypes, strict=False):
        state = enter(later, state.params, before)
    return state


def _masters(recipe: Recipe, params: Any) -> Any:
    if not recipe.master_weights:
        return params

    def master(x):
        return x.astype(MASTER) if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 2 else x

    return jax.tree.map(master, params)


def param_dtypes(phases: Sequence[Recipe], model: Decoder) -> tuple[Any, ...]:
    """The dtypes that each phase made its parameters of, where its state keeps master weights; else None."""
    if not any(phase.master_weights for phase in phases):
        return (None,) * len(phases)
    params, found = jax.eval_shape(phases[0].init, model), []
    for i, phase in enumerate(phases):
        params = jax.eval_shape(phase.enter, params)[0] if i else params
        found.append(jax.tree.map(lambda x: x.dtype, params) if phase.master_weights else None)
    return tuple(found)


def round_parameters(params: Any, dtypes: Any) -> Any:
    """The parameters as the loss sees them and as they are exported: rounded, if these are master weights."""
    return params if dtypes is None else jax.tree.map(lambda x, dtype: x.astype(dtype), params, dtypes)


Update = Callable[[TrainState, Decoder | None, Any, Any], tuple[TrainState, dict[str, Any]]]


def make_update(recipe: Recipe, dtypes: Any = None, before: int = 0) -> Update:
    """The jitted step `(state, model, batch, step) -> (state, numbers)`; it takes the state's memory over. Beside the
    loss and the recipe's scalars the numbers say whether loss and gradients are finite (`FINITE`).

    Args:
        dtypes: of parameters with master weights (`param_dtypes`).
        before: updates of the run before this phase; its steps count from 0.

    Raises:
        ValueError: where the recipe's loss gives a scalar a name that the log has for something else.
    """
    tx = recipe.optimizer()

    def gradient(state: TrainState, model: Decoder | None, batch: Any, key: jax.Array, step: Any):
        def loss(params):
            frozen = recipe.frozen(model, state.constants)
            value, numbers = recipe.loss(round_parameters(params, dtypes), frozen, batch, key, step)
            if taken := {"loss", FINITE, *LINE} & numbers.keys():
                raise ValueError(
                    f"{type(recipe).__name__}.loss: {min(taken)!r} is the log's own, call it otherwise"
                )
            return value, {"loss": value} | {name: jnp.asarray(x) for name, x in numbers.items()}

        (_, numbers), found = jax.value_and_grad(loss, has_aux=True)(state.params)
        return found, numbers

    def update(state: TrainState, model: Decoder | None, batch: Any, step: Any):
        key = jax.random.fold_in(jax.random.key(recipe.seed), before + step)
        if recipe.accumulate == 1:
            found, numbers = gradient(state, model, batch, key, step)
        else:
            found, numbers = _accumulate(recipe.accumulate, gradient, state, model, batch, key, step)
            # moments have the parameters' dtypes, and keep them
            found = jax.tree.map(lambda x, param: x.astype(param.dtype), found, state.params)
        numbers[FINITE] = all_finite((numbers["loss"], found))
        change, opt = tx.update(found, state.opt, state.params)
        return TrainState(optax.apply_updates(state.params, change), opt, state.constants), numbers

    return jax.jit(update, donate_argnums=0)


def _accumulate(
    parts: int,
    gradient: Callable[..., tuple[Any, dict[str, Any]]],
    state: TrainState,
    model: Decoder | None,
    batch: Any,
    key: jax.Array,
    step: Any,
) -> tuple[Any, dict[str, Any]]:
    """The means over the batch's parts, one after another; each part has as many rows of every device."""

    def split(x):
        rest = (None,) * (x.ndim - 1)
        x = jax.lax.reshape(x, (x.shape[0] // parts, parts, *x.shape[1:]), out_sharding=P(BATCH, None, *rest))
        return jnp.moveaxis(x, 1, 0)

    def one(total, part):
        part = jax.tree.map(lambda x: reshard(x, P(BATCH, *(None,) * (x.ndim - 1))), part)
        found = gradient(state, model, part, key, step)
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype) / parts, total, found), None

    batches = jax.tree.map(split, batch)
    first = jax.tree.map(lambda x: x[0], batches)
    shapes = jax.eval_shape(gradient, state, model, first, key, step)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32, out_sharding=x.sharding), shapes)
    total, _ = jax.lax.scan(one, zeros, batches)
    return total
