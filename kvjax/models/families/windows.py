"""Sliding windows in `config.json`, read as in transformers."""

from collections.abc import Sequence
from typing import Any

from kvjax.models.json_file import JsonObject

FULL, SLIDING = "full_attention", "sliding_attention"
Windows = tuple[int | None, Sequence[int]]
"""The number of tokens that a sliding-window layer sees, and the indices of these layers. None: all layers see all
tokens."""


def window_of(keys: JsonObject, default: int | None) -> int | None:
    """Return `sliding_window`, or `default` if the key is missing. A null is returned as None."""
    return keys.get("sliding_window", int, None) if "sliding_window" in keys.data else default


def listed_layers(keys: JsonObject, default: Sequence[int]) -> Sequence[int]:
    """Return the sliding-window layers that `layer_types` lists, or `default` if the key is missing."""
    kinds = keys.get("layer_types", list, None)
    return default if kinds is None else [layer for layer, kind in enumerate(kinds) if kind == SLIDING]


def all_layers(keys: JsonObject) -> range:
    """Return the indices of all layers."""
    return range(max(keys.get("num_hidden_layers", int), 0))


def upper_layers(keys: JsonObject) -> Windows:
    """Return the windows of a family that has them from layer `max_window_layers` on, if `use_sliding_window` is
    set."""
    if not keys.get("use_sliding_window", bool, False):
        return None, ()
    upper = all_layers(keys)[max(keys.get("max_window_layers", int, 28), 0) :]
    return window_of(keys, 4096), listed_layers(keys, upper)


def upper_layers_keys(config: Any) -> dict[str, Any]:
    """Return the keys that `upper_layers` reads, given a `ModelConfig`."""
    if not config.sliding_layers:
        return {}
    first = min(config.sliding_layers)
    return {"use_sliding_window": True, "max_window_layers": first} | layer_keys(config)


def layer_keys(config: Any) -> dict[str, Any]:
    """Return `sliding_window` and `layer_types`, given a `ModelConfig`."""
    kinds = [SLIDING if slides else FULL for slides in config.slides]
    return {"sliding_window": config.sliding_window or None, "layer_types": kinds}
