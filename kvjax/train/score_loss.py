"""The loss that gates learn scores by, layer by layer, and its schedule (Fast KVzip, §3; `optim.py` of its code)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.mesh import BATCH, HEADS, P
from kvjax.policies.eviction.fast_kvzip import SinkGate

CLIP = 1e-6
"""Of predictions, from 0 and from 1."""
IMPORTANT = 0.05
"""What a target and a prediction are both above, or both below, where they agree."""
WARM_UP = 0.01
"""Share of the updates that warm the learning rate up."""
LAYER = "loss/"
"""Begins the names of the layers' losses."""


def scores(gates: SinkGate, x: Float[Array, "b l ..."]) -> Float[Array, "l k b"]:
    """What the gates predict of positions' inputs, rows split over the batch shards, and kv heads."""
    if x.ndim == 3:
        x = jnp.swapaxes(x, 0, 1)[:, None]
    else:  # a key for each kv head
        x = jax.sharding.reshard(x.transpose(1, 2, 0, 3)[:, None], P(None, None, HEADS, BATCH, None))

    def local(gates, x):
        return jax.vmap(lambda gate, x: gate(x))(gates, x)

    return jax.shard_map(local, out_specs=P(None, None, HEADS, BATCH))(gates, x)[:, 0]


def by_head(score: Float[Array, "b l k"]) -> Float[Array, "l k b"]:
    """Targets as `scores` has its predictions."""
    return jax.sharding.reshard(score.transpose(1, 2, 0), P(None, HEADS, BATCH))


def cross_entropy(predicted: Float[Array, "..."], target: Float[Array, "..."]) -> Float[Array, "..."]:
    """−t log p − (1 − t) log(1 − p), with p at least 1e-6 from 0 and 1."""
    p = jnp.clip(predicted, CLIP, 1 - CLIP)
    return -target * jnp.log(p) - (1 - target) * jnp.log1p(-p)


def agreement(predicted: Float[Array, "..."], target: Float[Array, "..."]) -> Float[Array, "..."]:
    """1 where both are at least .05 or neither is."""
    return ((predicted >= IMPORTANT) == (target >= IMPORTANT)).astype(jnp.float32)


def entropy(target: Float[np.ndarray, "n l k"]) -> float:
    """What the loss is where every prediction is its target."""
    t = np.clip(target.astype(np.float64), 1e-12, 1 - 1e-12)
    return float((-t * np.log(t) - (1 - t) * np.log1p(-t)).mean(0).sum())


def rate(update: Any, peak: float, steps: int) -> Float[Array, ""]:
    """Return the learning rate of an update: .01 · i of the peak in the first 1% of the updates, then all of it, half
    of it after half of them and a quarter after three quarters (`lr_schedule` of the authors' code)."""
    late = jnp.where(update < steps * 0.75, 0.5, 0.25)
    usual = jnp.where(update < steps * 0.5, 1.0, late)
    return peak * jnp.where(update < WARM_UP * steps, 0.01 * update, usual)


def by_layer(losses: Float[Array, "l ..."]) -> dict[str, Float[Array, "..."]]:
    """The layers' losses by their names, which sort."""
    digits = len(str(len(losses) - 1))
    return {f"{LAYER}{layer:0{digits}}": loss for layer, loss in enumerate(losses)}
