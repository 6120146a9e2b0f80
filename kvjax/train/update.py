"""The update of a training step: parameters and optimizer state become the next ones, with numbers to log."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import reshard

from kvjax.mesh import BATCH, P
from kvjax.models.decoder import Decoder
from kvjax.struct import struct
from kvjax.train.checkpoints import all_finite
from kvjax.train.metrics import FINITE, RESERVED
from kvjax.train.recipe import Recipe

MASTER = jnp.float32
"""The dtype of the master weights of 16-bit parameters."""


@struct
class TrainState:
    """The state of a training, split over the mesh as the parameters are."""

    params: Any
    """The recipe's parameters. With master weights, 16-bit parameters are float32."""
    opt: Any
    """The state of the optax optimizer."""


def initial_state(recipe: Recipe, model: Decoder) -> TrainState:
    """Return the state before the first update. Callers jit it under a mesh."""
    params = _masters(recipe, recipe.init(model))
    return TrainState(params, recipe.optimizer().init(params))


def _masters(recipe: Recipe, params: Any) -> Any:
    if not recipe.master_weights:
        return params

    def master(x):
        return x.astype(MASTER) if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 2 else x

    return jax.tree.map(master, params)


def param_dtypes(recipe: Recipe, model: Decoder) -> Any:
    """Return the dtypes of the parameters as the loss sees them, or None without master weights."""
    if not recipe.master_weights:
        return None
    return jax.tree.map(lambda x: x.dtype, jax.eval_shape(recipe.init, model))


def round_parameters(params: Any, dtypes: Any) -> Any:
    """Return the parameters as the loss sees them and as they are exported: rounded if they are master weights."""
    return params if dtypes is None else jax.tree.map(lambda x, dtype: x.astype(dtype), params, dtypes)


Update = Callable[[TrainState, Decoder | None, Any, Any], tuple[TrainState, dict[str, Any]]]


def make_update(recipe: Recipe, dtypes: Any = None) -> Update:
    """Return the jitted step `(state, model, batch, step) -> (state, numbers)`, which donates the state. The numbers
    are the loss, the recipe's scalars and `FINITE`, True if loss and gradients are finite.

    Args:
        dtypes: the dtypes of parameters with master weights (`param_dtypes`).

    Raises:
        ValueError: a scalar of the recipe's loss has a name that the log reserves. Raised when the step is traced.
    """
    tx = recipe.optimizer()

    def gradient(state: TrainState, model: Decoder | None, batch: Any, key: jax.Array, step: Any):
        def loss(params):
            value, numbers = recipe.loss(round_parameters(params, dtypes), model, batch, key, step)
            if reserved := {"loss", FINITE, *RESERVED} & numbers.keys():
                raise ValueError(
                    f"{type(recipe).__name__}.loss: {min(reserved)!r} is reserved by the log: choose another name"
                )
            return value, {"loss": value} | {name: jnp.asarray(x) for name, x in numbers.items()}

        (_, numbers), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
        return gradients, numbers

    def update(state: TrainState, model: Decoder | None, batch: Any, step: Any):
        key = jax.random.fold_in(jax.random.key(recipe.seed), step)
        if recipe.accumulate == 1:
            gradients, numbers = gradient(state, model, batch, key, step)
        else:
            gradients, numbers = _accumulate(recipe.accumulate, gradient, state, model, batch, key, step)
            # the optimizer's moments keep the parameters' dtypes
            gradients = jax.tree.map(lambda x, param: x.astype(param.dtype), gradients, state.params)
        numbers[FINITE] = all_finite((numbers["loss"], gradients))
        change, opt = tx.update(gradients, state.opt, state.params)
        return TrainState(optax.apply_updates(state.params, change), opt), numbers

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
    """Return the mean gradient and numbers over the batch's parts, which are computed one after another. A part has the
    same number of rows on every device. A decoder's large gradients are summed over `data` once, after all parts."""

    def split(x):
        rest = (None,) * (x.ndim - 1)
        x = jax.lax.reshape(x, (x.shape[0] // parts, parts, *x.shape[1:]), out_sharding=P(BATCH, None, *rest))
        return jnp.moveaxis(x, 1, 0)

    def unreduced(x):
        return x.with_unreduced_gradients() if isinstance(x, Decoder) else x

    params = jax.tree.map(unreduced, state.params, is_leaf=lambda x: isinstance(x, Decoder))
    unreduced_state = dataclasses.replace(state, params=params)

    def add_part(total, part):
        part = jax.tree.map(lambda x: reshard(x, P(BATCH, *(None,) * (x.ndim - 1))), part)
        gradients = gradient(unreduced_state, model, part, key, step)
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, gradients), None

    def mean(x):
        return reshard(x, P(*jax.typeof(x).sharding.spec.partitions)) / parts

    batches = jax.tree.map(split, batch)
    first = jax.tree.map(lambda x: x[0], batches)
    shapes = jax.eval_shape(gradient, unreduced_state, model, first, key, step)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32, out_sharding=x.sharding), shapes)
    total, _ = jax.lax.scan(add_part, zeros, batches)
    return jax.tree.map(mean, total)
