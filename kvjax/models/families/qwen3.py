"""Qwen3: queries and keys are normalised before RoPE."""

from typing import Any

from kvjax.models.families.family import Family
from kvjax.models.families.windows import Windows, upper_layers, upper_layers_keys
from kvjax.models.json_file import JsonObject


class Qwen3(Family):
    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    gguf = "qwen3"

    def fields(self, keys: JsonObject) -> dict[str, Any]:
        bias = keys.get("attention_bias", bool, False)
        return {"qk_norm": True, "attention_bias": bias, "attention_out_bias": bias}

    def windows(self, keys: JsonObject) -> Windows:
        return upper_layers(keys)

    def keys(self, config: Any) -> dict[str, Any]:
        return {"attention_bias": config.attention_bias} | upper_layers_keys(config)
