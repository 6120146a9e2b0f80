"""A recurrent scorer, one window late, for a constant cache, and a base model that learns to live with it (KVPOP)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kvjax.policies import Policy
from kvjax.policies.interfaces import Admission, Keep
from kvjax.struct import static, struct
from kvjax.train.objective import deployed_mask, next_token_loss, student
from kvjax.train.recipe import Recipe
from pallas_kernels.attention_mass import attention_mass

DECAY, FLOOR = 0.8, -30.0


@struct
class Scorer(Admission):
    """s_i = decay · s_{i−1} + w · [k_i; v_i] is the score of token i − window + 1, which leaves next."""

    weight: jax.Array
    capacity: jax.Array
    window: int = static()

    def init(self, shape):
        return jnp.zeros((shape.batch, shape.kv_heads))

    def score(self, state, step, seen, valid):
        one = lambda s, x: (jnp.where(x[1], DECAY * s + x[0], s),) * 2  # noqa: E731
        entry = jax.lax.stop_gradient(jnp.concatenate([step.k, step.v], -1).astype(jnp.float32))
        new = jnp.einsum("bkth,kh->tbk", entry, self.weight)
        last, scores = jax.lax.scan(one, state, (new, (step.position >= 0).T[..., None]))
        return last, jnp.moveaxis(scores, 0, 2), self.window - 1

    def keep(self):
        return Keep(jnp.float32(-jnp.inf), self.capacity)

    def masks(self, step):
        score, mask = deployed_mask(self, step, self.window)
        return score, [mask]

    def figures(self, state, step, outputs):
        counted = {"over": "logsumexp", "group": "max", "offset": self.window, "lse": outputs[0][1]}
        target = jnp.maximum(attention_mass(step.q, step.k, **counted), FLOOR)
        return {"score_error": jnp.square(jnp.where(target > FLOOR, state - target, 0)).mean(-1)}


@dataclasses.dataclass(frozen=True)
class DelayedScorer(Recipe):
    """Train a model and its scorer for a cache of window + capacity entries."""

    takes_model = True
    window: int = 8
    """Last tokens that are visible."""
    capacity: int = 8
    """Entries beyond the window that a kv head keeps."""
    lr: float = 1e-3
    """AdamW's."""

    def init(self, model):
        return {"scorer": jnp.zeros((*model.layers.k.shape[::2], 2 * model.config.head_dim)), "model": model}

    def split(self, params):
        return params["scorer"], params["model"]

    def loss(self, params, frozen, batch, key, step):
        model, capacity = params["model"], jnp.full(len(params["scorer"]), self.capacity)
        scorer = Scorer(params["scorer"], capacity, self.window)
        hidden, figures = student(scorer, model, batch, window=self.window)
        error, apart = next_token_loss(model, hidden, batch), figures["score_error"].mean()
        return error + apart, {"cross_entropy": error, "score_error": apart}

    def optimizer(self):
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(self.lr))

    def deploy(self, params, model):
        return Policy(Scorer(np.asarray(params), np.asarray(self.capacity), self.window))
