"""Fingerprints: a fixed sample of a model's weights, which distinguishes models of the same shape.

Gates, scorers and head patterns carry the fingerprint of the model that they were made for (`MadeFor`, in config.json).
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float32, Int, Shaped

from kvjax.errors import UserError, warn
from kvjax.mesh import AXES, P, use_mesh

POINTS = 128
"""The number of weights sampled from each unfused array of the model."""
STRIDES = 7919, 104729, 1299709, 15485863
"""Point i lies at index i · stride (modulo the size) of each axis of an array."""
MATRICES = "q", "k", "v", "o", "gate", "up", "down"
"""The matrices of layers whose signs make the fingerprint."""
SIZE_FIELDS = "num_layers", "width", "mlp_width", "num_heads", "num_kv_heads", "head_dim", "qk_norm"
RELATED, IDENTICAL = 0.75, 0.99
"""Shares of the signs in which two models agree. Below the first, they are different models (which agree in about
half); below the second, one is a fine-tuned or quantised version of the other."""
KEY = "made_for"
"""The key in config.json."""


@dataclass(frozen=True)
class MadeFor:
    """The model that gates, scorers or a head pattern were made for."""

    model: str
    """The model's name, for messages."""
    fingerprint: str
    """The fingerprint of the model's weights, in hexadecimal."""

    @classmethod
    def of(cls, model: Any, name: str | None = None) -> "MadeFor":
        """Return the `MadeFor` of a model. Call it in every process."""
        return cls(name or model_name(model), fingerprint(model))

    @classmethod
    def described(cls, description: Mapping[str, Any]) -> "MadeFor | None":
        """Return the entry of a config.json; None if it has none, as in files of other programs and in older
        exports."""
        entry = description.get(KEY)
        if not isinstance(entry, dict) or not all(
            isinstance(entry.get(x), str) for x in ("model", "fingerprint")
        ):
            return None
        return cls(entry["model"], entry["fingerprint"])

    @property
    def description(self) -> dict[str, dict[str, str]]:
        """The entry of config.json."""
        return {KEY: {"model": self.model, "fingerprint": self.fingerprint}}

    def check(self, what: str, model: Any) -> None:
        """Refuse to use `what` for another model. A fine-tuned or quantised version of the same model causes a warning.
        A model of shapes without weights is accepted.

        Args:
            what: the subject of the message, such as the path of gates.

        Raises:
            UserError: `model` is another model, possibly of the same shape.
        """
        if not _has_weights(model):
            return
        share = agreement(self.fingerprint, fingerprint(model))
        if share < RELATED:
            raise UserError(
                f"{what}: made for the model {self.model}, not for {model_name(model)}, whose weights differ; "
                "--force (force=True in Python) accepts it"
            )
        if share < IDENTICAL:
            warn(
                f"{what}: made for the model {self.model}, of which {model_name(model)} is a fine-tuned or quantised "
                f"version: {100 * share:.0f}% of the weights that are compared agree in sign",
                stacklevel=2,
            )


def model_name(model: Any) -> str:
    """Return the path or hub id that a model was read from, for messages."""
    return getattr(model.config, "name", "") or "a model without a name"


def fingerprint(model: Any) -> str:
    """Return 8 hexadecimal digits for the model's sizes, and 224 for the signs of a sample of its layers' matrices.

    Signs depend neither on the mesh nor on the dtype of the weights. Two different models agree in about half of them.
    Call it in every process.
    """
    arrays = model.unfused_arrays()
    values = _sample(model, {name: arrays[f"layers.{name}.value"] for name in MATRICES})
    signs = np.packbits(np.concatenate([values[name] < 0 for name in MATRICES]))
    sizes = repr([getattr(model.config, name) for name in SIZE_FIELDS])
    return hashlib.sha256(sizes.encode()).hexdigest()[:8] + signs.tobytes().hex()


def contents(model: Any) -> str:
    """Return a digest of the configuration and of a sample of all weights. Further training changes it. Call it in
    every process."""
    values, config = _sample(model, model.unfused_arrays()), model.config
    # the cache's dtype and the end tokens that only a chat template names are not properties of the model
    ends = {id_ for _, id_ in config.turn_ends}
    eos_ids = tuple(id_ for id_ in config.eos_ids if id_ not in ends)
    config = dataclasses.replace(config, name="", eos_ids=eos_ids, kv_cache_dtype=None)
    digest = hashlib.sha256(_canonical_text(config).encode())
    for name in sorted(values):
        digest.update(name.encode() + values[name].tobytes())
    return digest.hexdigest()[:16]


LATER_FIELDS = (
    *("no_rope", "share", "short_factor", "long_factor", "sliding_window", "sliding_layers", "sliding_rope"),
    *("norm_offset", "post_norms", "embed_factor", "query_factor"),
    *("num_experts", "experts_per_token", "norm_expert_weights", "expert_bias", "swiglu", "attention_sinks"),
    *("weights", "weight_block", "kv_cache_dtype"),
)
"""Fields of configurations that digests omit while they have their defaults, since early versions did not have them."""


def _canonical_text(config: Any) -> str:
    """Return a configuration as text for its digest, in the form of earlier versions, so that digests stay the same."""
    parts = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.repr and not (field.name in LATER_FIELDS and value == field.default):
            parts.append(
                f"{field.name}={_canonical_text(value) if dataclasses.is_dataclass(value) else repr(value)}"
            )
    return f"{type(config).__name__}({', '.join(parts)})"


def agreement(one: str, other: str) -> float:
    """Return the share of the signs in which two fingerprints agree; 0 if the models' sizes differ."""
    if one[:8] != other[:8] or len(one) != len(other):
        return 0.0
    signs = [np.unpackbits(np.frombuffer(bytes.fromhex(x[8:]), np.uint8)) for x in (one, other)]
    return float(np.mean(signs[0] == signs[1]))


def _has_weights(model: Any) -> bool:
    leaves = jax.tree.leaves(model)
    return all(isinstance(x, jax.Array) and not isinstance(x, Tracer) for x in leaves)


def _sample(model: Any, arrays: Mapping[str, Any]) -> dict[str, Float32[np.ndarray, " points"]]:
    """Return POINTS numbers of each unfused array of a model. Padding rows of vocabulary tables are not sampled, since
    their number depends on the mesh."""
    stored, indices = {}, {}
    for name, array in arrays.items():
        rows = model.config.vocab_size if name.startswith(("embed", "head")) else array.shape[0]
        sizes = (rows, *array.shape[1:])
        points = [np.arange(POINTS) * stride % size for stride, size in zip(STRIDES, sizes, strict=False)]
        stored[name], indices[name] = array.stored, array.stored_indices(np.stack(points)).astype(np.int32)
    with use_mesh(model):
        return jax.device_get(_take(stored, indices))


@jax.jit
def _take(
    arrays: dict[str, Shaped[Array, "..."]], indices: dict[str, Int[Array, "axes points"]]
) -> dict[str, Float32[Array, " points"]]:
    """Return the numbers at these indices on every device. The device that holds a number contributes it."""

    def local(x, indices):
        inside, local_index = jnp.ones(POINTS, bool), []
        for axis, index in enumerate(indices):
            if spec[axis] is not None:
                index = index - lax.axis_index(spec[axis]) * x.shape[axis]
            inside &= (index >= 0) & (index < x.shape[axis])
            local_index.append(jnp.clip(index, 0, x.shape[axis] - 1))
        numbers = jnp.where(inside, x[tuple(local_index)].astype(jnp.float32), 0)
        split = [name for name in AXES if name in jax.tree.leaves(tuple(spec))]
        return lax.psum(numbers, tuple(split)) if split else numbers

    values = {}
    for name, x in arrays.items():
        spec = jax.typeof(x).sharding.spec
        values[name] = jax.shard_map(local, in_specs=(spec, P()), out_specs=P())(x, indices[name])
    return values
