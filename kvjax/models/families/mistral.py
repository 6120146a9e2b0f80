"""Mistral, from version 0.2 on: without a sliding window."""

from typing import Any

from kvjax.models.families.family import Family


class Mistral(Family):
    model_type = "mistral"
    architecture = "MistralForCausalLM"
    sliding_window = "all layers"
    default_window = 4096

    def keys(self, config: Any) -> dict[str, Any]:
        return {"sliding_window": None}
