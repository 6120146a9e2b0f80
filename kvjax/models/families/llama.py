"""Llama 2 to 3.2, and the many models with the same architecture, such as SmolLM2."""

from typing import Any

from kvjax.models.families.family import Family
from kvjax.models.json_file import JsonObject


class Llama(Family):
    model_type = "llama"
    architecture = "LlamaForCausalLM"
    gguf = "llama"

    def fields(self, keys: JsonObject) -> dict[str, Any]:
        bias = keys.get("attention_bias", bool, False)
        return {
            "attention_bias": bias,
            "attention_out_bias": bias,
            "mlp_bias": keys.get("mlp_bias", bool, False),
        }

    def keys(self, config: Any) -> dict[str, Any]:
        return {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}
