"""Mistral 7B (arXiv:2310.06825), in whose version 0.1 alone all layers have a sliding window, and Ministral, where some
layers have one."""

from typing import Any

from kvjax.models.families.family import Family
from kvjax.models.families.windows import Windows, all_layers, layer_keys, listed_layers, window_of
from kvjax.models.json_file import JsonObject


class Mistral(Family):
    model_type = "mistral"
    architecture = "MistralForCausalLM"

    def windows(self, keys: JsonObject) -> Windows:
        return window_of(keys, 4096), all_layers(keys)

    def keys(self, config: Any) -> dict[str, Any]:
        return {"sliding_window": config.sliding_window or None}


class Ministral(Family):
    model_type = "ministral"
    architecture = "MinistralForCausalLM"

    def windows(self, keys: JsonObject) -> Windows:
        return window_of(keys, 4096), listed_layers(keys, all_layers(keys))

    def keys(self, config: Any) -> dict[str, Any]:
        return layer_keys(config)
