"""The loss of gates that learn scores, layer by layer, and their learning rate (Fast KVzip, §3; `optim.py` of its
code)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from kvjax.mesh import BATCH, HEADS, P

CLIP = 1e-6
"""The minimum distance of predictions from 0 and 1."""
IMPORTANT = 0.05
"""The score from which a token counts as important. A target and a prediction agree if both reach it or neither does.
"""
WARM_UP = 0.01
"""The share of the updates in which the learning rate warms up."""
LAYER = "loss/"
"""The prefix of the names of the layers' losses."""


def scores(gates: nnx.Module, x: Float[Array, "b l ..."]) -> Float[Array, "l k b"]:
    """Return the scores that gates predict from the inputs of positions. Positions are split over the batch shards, and
    kv heads over the head shards."""
    if x.ndim == 3:
        x = jnp.swapaxes(x, 0, 1)[:, None]
    else:  # a key for each kv head
        x = jax.sharding.reshard(x.transpose(1, 2, 0, 3)[:, None], P(None, None, HEADS, BATCH, None))

    def local(gates, x):
        return jax.vmap(lambda gate, x: gate(x))(gates, x)

    return jax.shard_map(local, out_specs=P(None, None, HEADS, BATCH))(gates, x)[:, 0]


def by_head(score: Float[Array, "b l k"]) -> Float[Array, "l k b"]:
    """Return targets in the layout and sharding of the predictions of `scores`."""
    return jax.sharding.reshard(score.transpose(1, 2, 0), P(None, HEADS, BATCH))


def cross_entropy(predicted: Float[Array, "..."], target: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return −t log p − (1 − t) log(1 − p), with p clipped to a distance of at least 1e-6 from 0 and 1."""
    p = jnp.clip(predicted, CLIP, 1 - CLIP)
    return -target * jnp.log(p) - (1 - target) * jnp.log1p(-p)


def agreement(predicted: Float[Array, "..."], target: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return 1 where both are at least .05 or neither is, else 0."""
    return ((predicted >= IMPORTANT) == (target >= IMPORTANT)).astype(jnp.float32)


def entropy(target: Float[np.ndarray, "n l k"]) -> float:
    """Return the loss of predictions that equal their targets."""
    t = np.clip(target.astype(np.float64), 1e-12, 1 - 1e-12)
    return float((-t * np.log(t) - (1 - t) * np.log1p(-t)).mean(0).sum())


def rate(update: Any, peak: float, steps: int) -> Float[Array, ""]:
    """Return the learning rate of update i. It is peak · min(1, i / 100) in the first 1% of the updates, then the peak,
    half of the peak after half of the updates and a quarter after three quarters (`lr_schedule` of the authors' code,
    whose runs have 5,000 updates). A run of one update has no warmup."""
    late = jnp.where(update < steps * 0.75, 0.5, 0.25)
    usual = jnp.where(update < steps * 0.5, 1.0, late)
    return peak * jnp.where(update < min(WARM_UP * steps, steps - 1), jnp.minimum(0.01 * update, 1.0), usual)


def by_layer(losses: Float[Array, "l ..."]) -> dict[str, Float[Array, "..."]]:
    """Return the layers' losses by name. The layers' numbers are zero-padded, so that names sort by layer."""
    digits = len(str(len(losses) - 1))
    return {f"{LAYER}{layer:0{digits}}": loss for layer, loss in enumerate(losses)}
