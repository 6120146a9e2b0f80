"""A recipe that trains the model itself in two phases: first on its tokens, then to match that model's outputs with
little of the context."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from kvjax.policies import make_policy
from kvjax.policies.base import Mask
from kvjax.struct import static, struct
from kvjax.train.objective import next_token_loss, student
from kvjax.train.recipe import Recipe


@struct
class Streaming:
    """A method with sinks and a window in every head; `layer_axis` gives the layer axis."""

    layer_axis: jax.Array
    window: int = static()

    def masks(self, step):
        position = jnp.arange(step.k.shape[2])
        end = jnp.where(position < 2, jnp.iinfo(jnp.int32).max, position + self.window)
        return None, [Mask(end=jnp.broadcast_to(end, step.k.shape[:3]))]

    def figures(self, state, step, outputs):
        return {}


@dataclasses.dataclass(frozen=True)
class WholeModel(Recipe):
    """Train the whole model for a constant cache."""

    takes_model = True
    window: int = 8
    """Number of last tokens that are visible."""
    lr: float = 1e-3
    """AdamW's learning rate."""
    phase: int = 1
    """1: full attention; 2: distilled from phase 1's model."""

    def phases(self):
        return self, dataclasses.replace(self, phase=2)

    def init(self, model):
        return {"model": model}

    def enter(self, params):
        return params, params["model"]

    def frozen(self, model, constants):
        return constants

    def split(self, params):
        return {}, params["model"]

    def loss(self, params, frozen, batch, key, step):
        model = params["model"]
        if self.phase == 1:
            return next_token_loss(model, model.hidden(batch, remat=True), batch), {}
        teacher = frozen.hidden(batch)
        hidden, _ = student(
            Streaming(jnp.zeros(model.config.num_layers), self.window), model, batch, window=self.window
        )
        error = jnp.mean(jnp.square(hidden.astype(jnp.float32) - teacher.astype(jnp.float32)))
        return error, {"apart": error}

    def optimizer(self):
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(self.lr))

    def deploy(self, params, model):
        return make_policy({"streaming_llm": {"sink": 2, "window": self.window}}, model=model)
