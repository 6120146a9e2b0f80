"""Qwen2 and Qwen2.5: queries, keys and values have biases."""

from typing import Any

from kvjax.models.families.family import Family
from kvjax.models.families.windows import Windows, upper_layers, upper_layers_keys
from kvjax.models.json_file import JsonObject


class Qwen2(Family):
    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    gguf = "qwen2"

    def fields(self, keys: JsonObject) -> dict[str, Any]:
        return {"attention_bias": True}

    def windows(self, keys: JsonObject) -> Windows:
        return upper_layers(keys)

    def keys(self, config: Any) -> dict[str, Any]:
        return upper_layers_keys(config)
