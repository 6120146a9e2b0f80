"""Surrogates in two formats: the folder of `kvjax.checkpoints.folder`, and the folder that NVIDIA publishes, as
transformers writes it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from kvjax.checkpoints.folder import (
    describe,
    exported_files,
    load_arrays,
    read_sizes,
    readable_as,
    save_exported,
)
from kvjax.checkpoints.module import arrays_of, filled
from kvjax.errors import UserError
from kvjax.policies.admission.kvzap.gate import Surrogate

METHOD = "kvzap"
"""The method's name in config.json."""


class Sizes(NamedTuple):
    """The sizes of surrogates."""

    layers: int
    kv_heads: int
    """The number of kv heads in each layer."""
    width: int
    """The width of the input."""
    hidden: int
    """The number of hidden units; 0: the surrogate is linear."""

    def make(self, seed: int = 0) -> Surrogate:
        """Return a new surrogate of these sizes."""
        return Surrogate(*self, rngs=nnx.Rngs(seed))


def save_gates(folder: str | Path, gates: Surrogate, description: Mapping[str, Any]) -> None:
    """Write a surrogate to a folder. `description` may hold a `threshold`, the `rate` of tokens that reach it (layers ×
    kv heads), and anything else about how the surrogate was made."""
    sizes = Sizes(*gates.shape, gates.hidden)
    save_exported(folder, arrays_of(gates), {"method": METHOD} | sizes._asdict() | dict(description))


def load_gates(folder: str | Path) -> tuple[Surrogate, dict[str, Any]]:
    """Return the surrogate in a folder that `save_gates` wrote or NVIDIA publishes, and its description.

    Raises UserError naming the faulty file.
    """
    description = describe(folder)
    sizes, arrays = _sizes(folder, description), load_arrays(folder)
    if "input_dim" in description:
        arrays = _renamed_arrays(folder, sizes, arrays)
    return filled(sizes.make, arrays, exported_files(folder)[0]), description


def check_made_for(gates: Surrogate, model: Any) -> None:
    """Raise UserError if the surrogate is for a model of another configuration."""
    expected = model.num_full_layers, model.num_kv_heads, model.width
    if gates.shape != expected:
        raise UserError(
            f"kvzap: these gates are for (layers, kv heads, width) = {gates.shape}, the model has {expected}"
        )


def _sizes(folder: str | Path, description: Mapping[str, Any]) -> Sizes:
    with readable_as("KVzap gates", folder):
        if description["method"] != METHOD:
            raise ValueError(f"the method is {description['method']}")
        if "input_dim" not in description:
            kinds = {name: int for name in Sizes._fields if name != "hidden" or description[name]}
            return Sizes(**{"hidden": 0} | read_sizes(description, kinds))
        names = [
            "n_modules",
            "output_dim",
            "input_dim",
            *(["hidden_dim"] if description["hidden_dim"] else []),
        ]
        return Sizes(*(*read_sizes(description, dict.fromkeys(names, int)).values(), 0)[:4])


def _renamed_arrays(folder: str | Path, sizes: Sizes, arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the arrays of a published folder under our names. torch's linear layers are [out, in]."""
    names = {"w2": "weight", "b2": "bias"}
    if sizes.hidden:
        names = {"w1": "0.weight", "b1": "0.bias", "w2": "2.weight", "b2": "2.bias"}
    with readable_as("KVzap gates", folder):
        return {
            ours: np.stack([arrays[f"layers.{layer}.{name}"] for layer in range(sizes.layers)])
            for ours, name in names.items()
        }
