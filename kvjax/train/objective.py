"""What gates are trained for: the frozen model's own hidden states under a small cache (WG-KV, §3)."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import reshard
from jaxtyping import Array, Float, Int

from kvjax.inference.attention import gated_attention
from kvjax.mesh import BATCH, P
from kvjax.models.decoder import Decoder, scan_layers
from kvjax.policies.interfaces import Trainable


def distillation(
    method: Trainable,
    model: Decoder,
    tokens: Int[Array, "b t"],
    *,
    window: int,
    weight: Float[Array, ""],
) -> tuple[Float[Array, ""], dict[str, Any]]:
    """Mean squared error between the final hidden states of student and teacher, plus `weight` times the sparsity term.

    Means go over sequences, tokens and width (the error, in float32), and over layers, sequences and kv heads (the
    method's scalars).

    Returns:
        the loss, and the scalars to log: loss, distillation, and the method's own.
    """
    teacher = jax.lax.stop_gradient(model.hidden(tokens))
    squares, scalars = student_errors(method, model, tokens, teacher, window=window)
    error = jnp.mean(squares)
    means = jax.tree.map(lambda scalar: scalar.mean((1, 2)).mean(), scalars)
    loss = error + weight * means["sparsity"]
    return loss, {"loss": loss, "distillation": error} | means


def student_errors(
    method: Trainable,
    model: Decoder,
    tokens: Int[Array, "b t"],
    teacher: Float[Array, "b t d"],
    *,
    window: int,
) -> tuple[Float[Array, "b t d"], dict[str, Float[Array, "l b k"]]]:
    """The squared differences between the final hidden states of the student and of `teacher`, in float32, and the
    method's scalars.

    The teacher is `model` with plain causal attention (`model.hidden`); the student the same weights with every layer
    gated at once, its layers recomputed in the backward pass.
    """
    position = reshard(jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), P(BATCH, None))

    def attend(step, carry, layer):
        o, scalars = gated_attention(layer, step, window=window)
        return o, carry, scalars

    x, _, scalars = scan_layers(model, model.embed_tokens(tokens), position, attend, xs=method, remat=True)
    difference = model.norm(x).astype(jnp.float32) - teacher.astype(jnp.float32)
    return jnp.square(difference), scalars
