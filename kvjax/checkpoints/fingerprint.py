"""A fixed sample of a model's weights, which tells it from another model of the same shape.

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
"""The number of weights in the sample of each of the model's own arrays."""
STRIDES = 7919, 104729, 1299709, 15485863
"""Point i lies at index i · stride (modulo the size) of each axis of an array."""
MATRICES = "q", "k", "v", "o", "gate", "up", "down"
"""The matrices of the layers whose signs are the fingerprint."""
SIZES = "num_layers", "width", "mlp_width", "num_heads", "num_kv_heads", "head_dim", "qk_norm"
ANOTHER, VERSION = 0.75, 0.99
"""Shares of the signs in which two models agree: below the first they are two models, which agree in half of them;
below the second one is a fine-tuned or quantised version of the other."""
KEY = "made_for"
"""The key in config.json."""


@dataclass(frozen=True)
class MadeFor:
    """The model that something was made for, by a name that people know it by and by its fingerprint."""

    model: str
    """The name that people know it by."""
    fingerprint: str
    """The fingerprint of its weights, in hexadecimal."""

    @classmethod
    def of(cls, model: Any, name: str | None = None) -> "MadeFor":
        """Return the `MadeFor` of things that are made for `model`. Call it in every process."""
        return cls(name or model_name(model), fingerprint(model))

    @classmethod
    def described(cls, description: Mapping[str, Any]) -> "MadeFor | None":
        """Return the entry of a config.json; None if it has none, like those of other programs and of older exports."""
        said = description.get(KEY)
        if not isinstance(said, dict) or not all(
            isinstance(said.get(x), str) for x in ("model", "fingerprint")
        ):
            return None
        return cls(said["model"], said["fingerprint"])

    @property
    def description(self) -> dict[str, dict[str, str]]:
        """The entry of config.json."""
        return {KEY: {"model": self.model, "fingerprint": self.fingerprint}}

    def check(self, what: str, model: Any) -> None:
        """Refuse `what` for another model. A version of the same one, fine-tuned or quantised, is a warning. A model of
        shapes without weights is accepted.

        Raises:
            UserError: `model` is another one, which may be of the same shape; names both.
        """
        if not _has_weights(model):
            return
        alike = agreement(self.fingerprint, fingerprint(model))
        if alike < ANOTHER:
            raise UserError(
                f"{what}: made for the model {self.model}, not for {model_name(model)}, whose weights are others; "
                "--force (force=True in Python) takes it nonetheless"
            )
        if alike < VERSION:
            warn(
                f"{what}: made for the model {self.model}, of which {model_name(model)} is a fine-tuned or quantised "
                f"version: {100 * alike:.0f}% of the weights that are compared agree in sign",
                stacklevel=2,
            )


def model_name(model: Any) -> str:
    """Return the path or hub id that a model was read from."""
    return getattr(model.config, "name", "") or "a model without a name"


def fingerprint(model: Any) -> str:
    """Return the model's sizes as 8 hexadecimal digits, and the signs of a sample of its layers' matrices as 224.

    Signs depend neither on the mesh nor on the dtype that weights are stored or read in. Two different models agree in
    about half of them. Call it in every process.
    """
    own = model.unfused_arrays()
    values = _sample(model, {name: own[f"layers.{name}.value"] for name in MATRICES})
    signs = np.packbits(np.concatenate([values[name] < 0 for name in MATRICES]))
    sizes = repr([getattr(model.config, name) for name in SIZES])
    return hashlib.sha256(sizes.encode()).hexdigest()[:8] + signs.tobytes().hex()


def contents(model: Any) -> str:
    """Return a digest of the configuration and of the values of a sample of all weights, as they were read. A model
    that was trained further has another one. Call it in every process."""
    values, config = _sample(model, model.unfused_arrays()), model.config
    # neither the dtype of a cache nor which of a chat template's tokens end an answer is the model's own
    ends = {id_ for _, id_ in config.turn_ends}
    own = tuple(id_ for id_ in config.eos_ids if id_ not in ends)
    known = hashlib.sha256(
        _written(dataclasses.replace(config, name="", eos_ids=own, kv_cache_dtype=None)).encode()
    )
    for name in sorted(values):
        known.update(name.encode() + values[name].tobytes())
    return known.hexdigest()[:16]


LATER = (
    *("no_rope", "share", "short_factor", "long_factor", "sliding_window", "sliding_layers", "sliding_rope"),
    *("norm_offset", "post_norms", "embed_factor", "query_factor"),
    *("num_experts", "experts_per_token", "norm_expert_weights", "expert_bias", "swiglu", "attention_sinks"),
    *("weights", "weight_block", "kv_cache_dtype"),
)
"""Fields of configurations that digests leave out while they have their defaults: they did not exist at first."""


def _written(config: Any) -> str:
    """Return a configuration as its digest has it, so that results and gates of earlier versions keep theirs."""
    parts = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.repr and not (field.name in LATER and value == field.default):
            parts.append(
                f"{field.name}={_written(value) if dataclasses.is_dataclass(value) else repr(value)}"
            )
    return f"{type(config).__name__}({', '.join(parts)})"


def agreement(one: str, other: str) -> float:
    """Return the share of the signs in which two fingerprints agree; 0 where the models' sizes differ."""
    if one[:8] != other[:8] or len(one) != len(other):
        return 0.0
    signs = [np.unpackbits(np.frombuffer(bytes.fromhex(x[8:]), np.uint8)) for x in (one, other)]
    return float(np.mean(signs[0] == signs[1]))


def _has_weights(model: Any) -> bool:
    leaves = jax.tree.leaves(model)
    return all(isinstance(x, jax.Array) and not isinstance(x, Tracer) for x in leaves)


def _sample(model: Any, arrays: Mapping[str, Any]) -> dict[str, Float32[np.ndarray, " points"]]:
    """Return POINTS numbers of each of a model's own arrays. In tables of the vocabulary only rows of tokens count,
    since the number of further rows depends on the mesh."""
    stored, places = {}, {}
    for name, own in arrays.items():
        rows = model.config.vocab_size if name.startswith(("embed", "head")) else own.shape[0]
        sizes = (rows, *own.shape[1:])
        points = [np.arange(POINTS) * stride % size for stride, size in zip(STRIDES, sizes, strict=False)]
        stored[name], places[name] = own.stored, own.stored_indices(np.stack(points)).astype(np.int32)
    with use_mesh(model):
        return jax.device_get(_at(stored, places))


@jax.jit
def _at(
    arrays: dict[str, Shaped[Array, "..."]], places: dict[str, Int[Array, "axes points"]]
) -> dict[str, Float32[Array, " points"]]:
    """Return the numbers at these places on every device, each taken by the device that holds it."""

    def local(x, places):
        inside, index = jnp.ones(POINTS, bool), []
        for axis, at in enumerate(places):
            at = at - lax.axis_index(spec[axis]) * x.shape[axis] if spec[axis] is not None else at
            inside &= (at >= 0) & (at < x.shape[axis])
            index.append(jnp.clip(at, 0, x.shape[axis] - 1))
        held = jnp.where(inside, x[tuple(index)].astype(jnp.float32), 0)
        split = [name for name in AXES if name in jax.tree.leaves(tuple(spec))]
        return lax.psum(held, tuple(split)) if split else held

    found = {}
    for name, x in arrays.items():
        spec = jax.typeof(x).sharding.spec
        found[name] = jax.shard_map(local, in_specs=(spec, P()), out_specs=P())(x, places[name])
    return found
