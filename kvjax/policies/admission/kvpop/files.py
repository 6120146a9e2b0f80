"""Scorers in the folder format of `kvjax.checkpoints.folder`: weights and a description."""

from pathlib import Path
from typing import Any

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
from kvjax.policies.admission.kvpop.scorer import Scorer, Sizes

METHOD = "kvpop"
"""The method's name in config.json."""


def save_scorers(folder: str | Path, scorers: Scorer, description: dict[str, Any]) -> None:
    """Write scorers to a folder. `description` holds max_entries, sink, window, delayed, decay and age as they were
    trained, and anything else about how the scorers were made."""
    save_exported(folder, arrays_of(scorers), {"method": METHOD} | scorers.sizes._asdict() | description)


def load_scorers(folder: str | Path) -> tuple[Scorer, dict[str, Any]]:
    """Return the scorers and the description that `save_scorers` wrote. Raises UserError naming the faulty file."""
    description = describe(folder)
    with readable_as("KVPOP scorers", folder):
        sizes = Sizes(**read_sizes(description, Sizes.__annotations__))
        if description["method"] != METHOD:
            raise ValueError(f"method is {description['method']!r}")
    return filled(sizes.make, load_arrays(folder), exported_files(folder)[0]), description


def check_made_for(sizes: Sizes, model: Any) -> None:
    """Raise UserError if the scorers are for a model of another configuration."""
    wanted = model.num_full_layers, model.num_kv_heads, model.head_dim
    if sizes[:3] != wanted:
        raise UserError(
            f"kvpop: these scorers are for (layers, kv heads, head_dim) = {sizes[:3]}, the model has {wanted}"
        )
