"""Learn which heads need the whole context, with hard-concrete masks under a Lagrangian with next-token loss (after
PruLong)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kvjax.policies import make_policy
from kvjax.policies.base import Mask
from kvjax.struct import static, struct
from kvjax.train.objective import next_token_loss, student
from kvjax.train.recipe import Recipe

BETA, LOW, HIGH = 2 / 3, -0.1, 1.1
"""Parameters of the hard-concrete distribution (Louizos et al., 2018)."""


@struct
class Blend:
    """The blend z · full attention + (1 − z) · sinks and window, by layer and kv head."""

    z: jax.Array
    sink: int = static()
    window: int = static()

    def masks(self, step):
        place = jnp.arange(step.k.shape[2])
        end = jnp.where(place < self.sink, jnp.iinfo(jnp.int32).max, place + self.window)
        return None, [Mask(self.z), Mask(1 - self.z, jnp.broadcast_to(end, step.k.shape[:3]))]

    def figures(self, state, step, outputs):
        return {}


@dataclasses.dataclass(frozen=True)
class HeadMasks(Recipe):
    """Learn which kv heads keep everything."""

    target: float = 0.5
    """Share of the heads that become streaming heads."""
    sink: int = 4
    """First tokens that a streaming head keeps."""
    window: int = 16
    """Last tokens that are always visible."""
    lr: float = 0.1
    """Learning rate of the masks and of the multipliers."""

    def init(self, model):
        shape = model.config.num_full_layers, model.config.num_kv_heads
        return {"mask": jnp.full(shape, 2.0), "multiplier": jnp.zeros(2)}

    def _retrieval(self, params):
        """Return the probability that each head is not streaming."""
        return jax.nn.sigmoid(params["mask"] - BETA * jnp.log(-LOW / HIGH))

    def loss(self, params, frozen, batch, key, step):
        u = jax.random.uniform(key, params["mask"].shape, minval=1e-6, maxval=1 - 1e-6)
        s = jax.nn.sigmoid((jnp.log(u) - jnp.log(1 - u) + params["mask"]) / BETA)
        z = jnp.clip(s * (HIGH - LOW) + LOW, 0, 1)
        hidden, _ = student(Blend(z, self.sink, self.window), frozen, batch, window=self.window)
        error = next_token_loss(frozen, hidden, batch)
        streaming = 1 - self._retrieval(params).mean()
        gap = streaming - self.target * jnp.minimum(1, step / (0.8 * self.steps))
        first, second = params["multiplier"]
        return error + first * gap + second * gap**2, {"cross_entropy": error, "streaming": streaming}

    def optimizer(self):
        ascent = optax.chain(optax.adam(self.lr), optax.scale(-1))
        groups = {"mask": optax.adam(self.lr), "multiplier": ascent}
        return optax.multi_transform(groups, {"mask": "mask", "multiplier": "multiplier"})

    def deploy(self, params, model):
        weights, sizes = np.asarray(self._retrieval(params)), {"sink": self.sink, "window": self.window}
        return make_policy(
            {"head_pattern": {"pattern": weights, "sparsity": self.target, **sizes}}, model=model
        )
