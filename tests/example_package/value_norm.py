"""Admit tokens whose values are large, by a limit for all heads (`value_norm`) or by one learned for each."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kvjax.policies import Policy
from kvjax.policies.base import Admission, Keep, Mask
from kvjax.struct import static, struct
from kvjax.train.objective import student_errors
from kvjax.train.recipe import Recipe


@struct
class ValueNorm(Admission):
    """A token is admitted iff its value's norm is at least the limit."""

    limit: Any  # a NumPy number for all layers and heads, or a table [l, k] with one for each

    def score(self, state, step, seen, valid):
        limit = jnp.broadcast_to(self.limit, step.k.shape[1:2])
        return state, jnp.linalg.norm(step.v, axis=-1) - limit[:, None], 0  # the priority is known at once

    def keep(self):
        return Keep(jnp.float32(0))  # a token stays iff its priority ≥ this threshold


def value_norm(*, limit: float = 1.0, window: int = 16) -> Policy:
    """Return the policy that `--policy value_norm:limit=2` names."""
    return Policy(ValueNorm(np.array(limit, np.float32)), name="value_norm", window=window)


@struct
class SoftNorm:
    """A soft gate on the value's norm. Training adds its logarithm to the logits beyond the window."""

    limit: jax.Array
    sharpness: float = static()

    def masks(self, step):
        over = jnp.linalg.norm(step.v, axis=-1) - self.limit[:, None]
        gate = jax.nn.sigmoid(self.sharpness * over)
        return gate, [Mask(log_gate=jnp.log(jnp.maximum(gate, 1e-3)))]

    def figures(self, state, step, outputs):
        return {"gate": state.mean(-1)}  # the mean gate of each sequence and kv head


@dataclasses.dataclass(frozen=True)
class LearnedValueNorm(Recipe):
    """Learn a limit for each kv head: `--method learned_value_norm`."""

    lambda_: float = 0.1
    """Weight of the mean gate. A larger one keeps less."""
    window: int = 16
    """Last tokens that are always visible."""
    lr: float = 0.05
    """Learning rate of Adam."""

    def init(self, model):
        return {"limit": jnp.full((model.config.num_full_layers, model.config.num_kv_heads), 1.0)}

    def loss(self, params, frozen, batch, key, step):
        teacher = jax.lax.stop_gradient(frozen.hidden(batch))
        method = SoftNorm(params["limit"], sharpness=2.0)
        squares, figures = student_errors(method, frozen, batch, teacher, window=self.window)
        error, gate = squares.mean(), figures["gate"].mean()
        return error + self.lambda_ * gate, {"distillation": error, "gate": gate}

    def optimizer(self):
        return optax.adam(self.lr)

    def deploy(self, params, model):
        return Policy(ValueNorm(np.asarray(params["limit"])), name="learned_value_norm", window=self.window)
