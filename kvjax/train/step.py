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


def schedule(sequences: int, rows: int, peak: float) -> optax.Schedule:
    """The learning rate of the update that begins with sequence s of the run: peak · s/w during the first tenth
    (w = sequences/10), then a cosine from peak to 0. Update i begins with sequence i · rows.

    WG-KV, App. C: 7,500 sequences, one an update, w = 750. Its code steps the schedule once a sequence, too.
    """
    warmup = max(1, math.floor(sequences / 10))

    def rate(update: Any) -> Float[Array, ""]:
        sequence = update * rows
        after = (sequence - warmup) / max(1, sequences - warmup)
        return peak * jnp.where(sequence < warmup, sequence / warmup, (1 + jnp.cos(jnp.pi * after)) / 2)

    return rate


def optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW with decay on every gate parameter; no clipping (WG-KV, App. C)."""
    rate = schedule(config.sequences, config.rows, config.lr)
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


def trained_method(config: TrainConfig, gates: WriteGate, *, hard: bool = False) -> WriteGateTraining:
    """The gates as they are trained; `hard`: as they are used, binarised at τ."""
    tau = jnp.full(gates.b2.shape[0], config.tau, jnp.float32)
    return WriteGateTraining(gates, tau, window=config.window, sparsity=config.sparsity, hard=hard)


Update = Callable[[TrainState, Decoder, Any], tuple[TrainState, dict[str, Any]]]


def make_update(config: TrainConfig) -> Update:
    """The jitted step `(state, model, tokens [b t]) -> (state, numbers)`; it takes the state's memory over."""
    tx = optimizer(config)

    def loss(gates: WriteGate, model: Decoder, tokens: Int[Array, "b t"]):
        method = trained_method(config, gates)
        return distillation(method, model, tokens, window=config.window, weight=jnp.float32(config.lambda_))

    def update(state: TrainState, model: Decoder, tokens: Int[Array, "b t"]):
        (_, numbers), gradient = jax.value_and_grad(loss, has_aux=True)(state.gates, model, tokens)
        change, opt = tx.update(gradient, state.opt, state.gates)
        return TrainState(optax.apply_updates(state.gates, change), opt), numbers

    return jax.jit(update, donate_argnums=0)
