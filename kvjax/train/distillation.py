"""The distillation loss of policies: how far they move the final hidden states of held-out sequences."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.mesh import BATCH, batch_shards, put, use_mesh
from kvjax.models.decoder import Decoder
from kvjax.policies import Policy
from kvjax.policies.compiled import on_mesh
from kvjax.train.objective import Deployed, student_errors
from kvjax.train.validation import by_length


def distillation(
    model: Decoder, policies: Mapping[str, Policy], sequences: Sequence[Int[np.ndarray, " _"]]
) -> dict[str, float | None]:
    """Return the mean squared difference between the final hidden states under each policy and those of full attention,
    over whole sequences. It is None for a policy that evicts or selects, since its admission alone does not determine
    what a token sees."""
    shape = model.config.num_full_layers, model.config.num_kv_heads
    with use_mesh(model):
        methods = {
            name: Deployed(on_mesh(policy.admission, *shape).traced, policy.window)
            for name, policy in policies.items()
            if policy.eviction is None and policy.selection is None
        }
        errors: dict[str, list[Any]] = {name: [] for name in methods}
        shards = batch_shards()
        for group in by_length(sequences, shards):
            # each shard needs a row, so the last one is repeated
            tokens = put(np.stack([group[min(row, len(group) - 1)] for row in range(shards)]), BATCH, None)
            teacher = _teacher(model, tokens)
            for name, method in methods.items():
                method_errors = np.asarray(_errors(method, model, tokens, teacher))
                errors[name].extend(method_errors[: len(group)])
    return {name: float(np.mean(errors[name])) if name in errors else None for name in policies}


@jax.jit
def _teacher(model: Decoder, tokens: Int[Array, "b t"]) -> Float[Array, "b t d"]:
    return model.hidden(tokens)


@jax.jit
def _errors(
    method: Deployed, model: Decoder, tokens: Int[Array, "b t"], teacher: Float[Array, "b t d"]
) -> Float[Array, " b"]:
    squares, _ = student_errors(method, model, tokens, teacher, window=method.window)
    return jnp.mean(squares, (1, 2))
