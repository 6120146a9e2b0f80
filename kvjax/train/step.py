"""One update: gates and AdamW's moments in, the next ones and the numbers to log out."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.policies.admission.wgkv import WriteGate, WriteGateTraining
from kvjax.struct import struct
from kvjax.train.config import TrainConfig
from kvjax.train.objective import distillation


@struct
class TrainState:
    """All that changes while training: a `WriteGate`, and optax's state, split over the mesh as the gates are."""

    gates: Any
    opt: Any


def schedule(steps: int, peak: float) -> optax.Schedule:
    """The learning rate of update i: peak · i/w during the first tenth (w = steps/10), then a cosine from peak to 0
    (WG-KV, App. C; its 7,500 updates give w = 750)."""
    warmup = max(1, math.floor(steps / 10))

    def rate(update: Any) -> Float[Array, ""]:
        after = (update - warmup) / max(1, steps - warmup)
        return peak * jnp.where(update < warmup, update / warmup, (1 + jnp.cos(jnp.pi * after)) / 2)

    return rate


def optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW with decay on every gate parameter; no clipping (WG-KV, App. C)."""
    rate = schedule(config.steps, config.lr)
    return optax.adamw(rate, b1=0.9, b2=0.999, eps=1e-8, weight_decay=config.weight_decay)


def initial_state(config: TrainConfig, model: ModelConfig) -> TrainState:
    """Random gates for the model, and the optimiser before the first update. To be jitted under a mesh."""
    usual = 1.5 if model.model_type == "qwen3" else 4.0
    gates: Any = WriteGate(
        model.num_layers,
        model.num_kv_heads,
        model.head_dim,
        expand=config.expand or usual,
        rngs=nnx.Rngs(config.seed),
    )
    return TrainState(gates, optimizer(config).init(gates))


Update = Callable[[TrainState, Decoder, Any], tuple[TrainState, dict[str, Any]]]


def make_update(config: TrainConfig) -> Update:
    """The jitted step `(state, model, tokens [b t]) -> (state, numbers)`; it takes the state's memory over."""
    tx = optimizer(config)

    def loss(gates: WriteGate, model: Decoder, tokens: Int[Array, "b t"]):
        tau = jnp.full(model.config.num_layers, config.tau, jnp.float32)
        method = WriteGateTraining(gates, tau, window=config.window, sparsity=config.sparsity)
        return distillation(method, model, tokens, window=config.window, weight=jnp.float32(config.lambda_))

    def update(state: TrainState, model: Decoder, tokens: Int[Array, "b t"]):
        (_, numbers), gradient = jax.value_and_grad(loss, has_aux=True)(state.gates, model, tokens)
        change, opt = tx.update(gradient, state.opt, state.gates)
        return TrainState(optax.apply_updates(state.gates, change), opt), numbers

    return jax.jit(update, donate_argnums=0)
