"""Qwen2 and Qwen2.5: queries, keys and values have biases."""

from typing import Any

from kvjax.models.families.family import Family
from kvjax.models.json_file import JsonObject


class Qwen2(Family):
    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    gguf = "qwen2"
    sliding_window = "upper layers"
    default_window = 4096

    def fields(self, keys: JsonObject) -> dict[str, Any]:
        return {"attention_bias": True}
