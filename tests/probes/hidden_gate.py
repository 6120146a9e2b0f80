"""A gate on hidden states, trained on a frozen model's layers to predict the largest attention that any query pays to a
key. Its score is stored with each entry and evicts over the whole model while decoding (after Fast KVzip)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kvjax.inference.capture import captured_layers
from kvjax.policies import Entries, Policy, Schedule, Trigger
from kvjax.policies.base import StoredScore, TokenMetadata
from kvjax.struct import struct
from kvjax.train.recipe import Recipe
from pallas_kernels.attention_mass import attention_mass


@struct
class HiddenGate(TokenMetadata, StoredScore):
    """An eviction that scores a token by a product with its layer's input."""

    weight: jax.Array
    name = "hidden_gate"

    def numbers(self, state, step, readout):
        return {"score": jnp.einsum("btd,kd->bkt", step.hidden.astype(jnp.float32), self.weight)}


@jax.jit
def largest_attention(q, k, lse):
    return jnp.log(attention_mass(q, k, over="max", group="max", offset=1, lse=lse) + 1e-4)


@dataclasses.dataclass(frozen=True)
class HiddenGates(Recipe):
    """Train gates on hidden states for a frozen model."""

    entries: int = 64
    """Entries that a kv head keeps, on average over the model."""
    every: int = 16
    """Tokens of an answer between two compactions."""
    lr: float = 1e-2
    """Learning rate of Adam."""

    def init(self, model):
        return jnp.zeros((model.config.num_full_layers, model.config.num_kv_heads, model.config.width))

    def batches(self, sequences, model):
        for rows in sequences:
            layers = list(captured_layers(model, Policy(), None, list(rows), ("hidden", "q", "k", "lse")))
            largest = [largest_attention(x["q"], x["k"], x["lse"]) for x in layers]
            yield {"hidden": np.stack([x["hidden"] for x in layers], 1), "largest": np.stack(largest, 1)}

    def loss(self, params, frozen, batch, key, step):
        score = jnp.einsum("bltd,lkd->blkt", batch["hidden"].astype(jnp.float32), params)
        error = jnp.square(score - batch["largest"]).mean()
        return error, {"apart": error}

    def optimizer(self):
        return optax.adam(self.lr)

    def deploy(self, params, model):
        gate = HiddenGate(np.asarray(params))
        return Policy(
            eviction=gate, schedule=Schedule(Entries(self.entries), Trigger("every", every=self.every))
        )
