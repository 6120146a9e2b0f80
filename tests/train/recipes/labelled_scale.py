"""The smallest recipe of labelled sequences: it trains one number that scales the final hidden states."""

import dataclasses

import jax.numpy as jnp
import optax

from kvjax.policies import make_policy
from kvjax.train.labelled import LabelledRecipe


@dataclasses.dataclass(frozen=True)
class Scale(LabelledRecipe):
    """Learn how sure the model should be of the labelled tokens."""

    lr: float = 0.1
    """SGD's learning rate."""

    def init(self, model):
        return {"scale": jnp.ones(())}

    def loss(self, params, frozen, batch, key, step):
        logits = frozen.logits(frozen.hidden(batch["tokens"]) * params["scale"])
        errors = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch["tokens"][:, 1:])
        learned = batch["labelled"][:, 1:]
        documents = 1 + batch["document"].max(1).mean()
        return jnp.sum(errors * learned) / learned.sum(), {"documents": documents, "labelled": learned.mean()}

    def optimizer(self):
        return optax.sgd(self.lr)

    def deploy(self, params, model):
        return make_policy("full", model=model)
