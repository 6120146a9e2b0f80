"""What a run leaves for use: the gates as safetensors and as an Orbax checkpoint, with how they were made."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import reshard
from jaxtyping import Array, Float, Int

from kvjax.attention import causal_attention
from kvjax.checkpoint import export
from kvjax.mesh import AXES, BATCH, P, gather
from kvjax.models.decoder import Decoder, scan_layers
from kvjax.policies.admission.wgkv import WriteGate, save_gates
from kvjax.step import Step
from kvjax.train.config import TrainConfig


@jax.jit
def admission_rates(
    model: Decoder, gates: WriteGate, tokens: Int[Array, "b t"], tau: Float[Array, ""]
) -> Float[Array, "l k"]:
    """The share of tokens whose gate is at least `tau`, by layer and kv head, under full attention."""

    def admitted(gates: WriteGate, step: Step, tau: Float[Array, ""]):
        return (gates(step.k_pre, step.k) >= tau).astype(jnp.float32).mean(-1)

    def attend(step, carry, gates):
        whole = gather(gates, "data", "fsdp")
        rates = jax.shard_map(admitted, out_specs=P(BATCH, "tensor"))(whole, step, tau)
        return causal_attention(step), carry, rates.mean(0)

    position = reshard(jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), P(BATCH, None))
    _, _, rates = scan_layers(model, model.embed_tokens(tokens), position, attend, xs=gates)
    return reshard(rates, P())


def export_gates(
    folder: Path, gates: WriteGate, config: TrainConfig, rates: Float[np.ndarray, "l k"]
) -> None:
    """Write `gates.safetensors`, `config.json` and the folder `orbax`. `kvjax.make_policy("wgkv", gates=folder)` reads
    them; `rates` sizes its pool."""
    description = {
        "tau": config.tau,
        "window": config.window,
        "rate": np.round(np.asarray(rates, np.float64), 4).tolist(),
        "model": config.model,
        "lambda": config.lambda_,
        "sparsity": config.sparsity,
        "steps": config.steps,
        "seed": config.seed,
    }
    whole = gather(gates, *AXES)
    if jax.process_index() == 0:
        save_gates(folder, whole, description)
    export(folder / "orbax", gates)
