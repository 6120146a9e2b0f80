"""A recipe that trains the model itself."""

import dataclasses

import optax

from kvjax.policies import make_policy
from kvjax.train.objective import next_token_loss
from kvjax.train.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class WholeModel(Recipe):
    """Train the whole model on its tokens, and use it with sinks and a window."""

    takes_model = True
    window: int = 8
    """Number of last tokens that are visible."""
    lr: float = 1e-3
    """AdamW's learning rate."""

    def init(self, model):
        return {"model": model}

    def split(self, params):
        return {}, params["model"]

    def loss(self, params, frozen, batch, key, step):
        model = params["model"]
        return next_token_loss(model, model.hidden(batch, remat=True), batch), {}

    def optimizer(self):
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(self.lr))

    def deploy(self, params, model):
        return make_policy({"streaming_llm": {"sink": 2, "window": self.window}}, model=model)
