"""What gates are worth on held-out documents: the distillation loss of the soft gates, which are trained, and of the
hard ones, which are used (WG-KV's code logs both); the mean gate; and the sizes."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, reshard
from jaxtyping import Array, Float, Int

from kvjax.mesh import P
from kvjax.models.decoder import Decoder
from kvjax.policies.admission.wgkv import WriteGate
from kvjax.train.config import TrainConfig
from kvjax.train.data import Rows, to_mesh
from kvjax.train.objective import student_errors
from kvjax.train.step import trained_method


@dataclasses.dataclass(frozen=True)
class Validation:
    """Means over the held-out sequences."""

    distillation: float
    """Of the soft gates."""
    hard_distillation: float
    """Of the gates binarised at τ."""
    gate: float
    """The mean soft gate."""
    admitted: float
    """Share of tokens whose gate is at least τ."""
    kv_size: float
    """Share of a sequence's entries that are left at its end, ring included."""
    sequences: int
    """How many."""
    rates: Float[np.ndarray, "s l k"]
    """`admitted` by sequence, layer and kv head."""

    @property
    def numbers(self) -> dict[str, float]:
        """For metrics.jsonl and the exported gates' config.json."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "rates"
        }

    def __str__(self) -> str:
        return (
            f"held out ({self.sequences} sequences): distillation {self.distillation:.4g} soft, "
            f"{self.hard_distillation:.4g} hard, gate {self.gate:.3f}, kv_size {self.kv_size:.3f}"
        )


Validate = Callable[[WriteGate, Decoder], Validation]


def make_validate(config: TrainConfig, mesh: Mesh, sequences: Sequence[Int[np.ndarray, " _"]]) -> Validate:
    """A function that measures gates on the held-out sequences. A sequence's figures do not depend on the mesh."""

    @jax.jit
    def measure(gates: WriteGate, model: Decoder, tokens: Int[Array, "b t"]) -> dict[str, Any]:
        teacher = model.hidden(tokens)

        def error(hard: bool):
            method = trained_method(config, gates, hard=hard)
            squares, scalars = student_errors(method, model, tokens, teacher, window=config.window)
            return jnp.mean(squares, (1, 2)), scalars

        soft, gated = error(False)
        hard, used = error(True)
        found = {
            "distillation": soft,
            "hard_distillation": hard,
            "gate": gated["gate"].mean((0, 2)),
            "kv_size": used["kv_size"].mean((0, 2)),
            "rates": used["admitted"].transpose(1, 0, 2),
        }
        return reshard(found, P())

    def validate(gates: WriteGate, model: Decoder) -> Validation:
        found: dict[str, list[Any]] = {}
        for group in _groups(sequences, config.mesh.batch_shards):
            rows = Rows.of_this_process(mesh, config.mesh.batch_shards)
            padded = np.stack([group[min(row, len(group) - 1)] for row in range(rows.start, rows.stop)])
            for name, values in jax.device_get(measure(gates, model, to_mesh(mesh, rows, padded))).items():
                found.setdefault(name, []).extend(values[: len(group)])
        rates = np.stack(found.pop("rates"))
        means = {name: float(np.mean(values, dtype=np.float64)) for name, values in found.items()}
        return Validation(
            **means, admitted=float(rates.mean(dtype=np.float64)), sequences=len(rates), rates=rates
        )

    return validate


def _groups(sequences: Sequence[Any], size: int) -> list[list[Any]]:
    """Sequences of one length, at most `size` together."""
    by_length: dict[int, list[Any]] = {}
    for tokens in sequences:
        by_length.setdefault(len(tokens), []).append(tokens)
    return [own[start : start + size] for own in by_length.values() for start in range(0, len(own), size)]
