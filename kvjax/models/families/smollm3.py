"""SmolLM3: like Llama, but every fourth layer has no RoPE (NoPE)."""

from typing import Any, ClassVar

from kvjax.errors import shown
from kvjax.models.families.llama import Llama
from kvjax.models.json_file import JsonObject

MOST_LAYERS = 10_000
"""The most layers of a model."""


class SmolLM3(Llama):
    model_type = "smollm3"
    architecture = "SmolLM3ForCausalLM"
    gguf = None
    default_theta = 2_000_000.0
    defaults: ClassVar = {"tie_word_embeddings": True}

    def fields(self, keys: JsonObject) -> dict[str, Any]:
        if keys.get("use_sliding_window", bool, False) and keys.get("sliding_window", int, None) is not None:
            raise keys.error("use_sliding_window is true, but sliding-window attention is not supported")
        layers, period = keys.get("num_hidden_layers", int), keys.get("no_rope_layer_interval", int, 4)
        listed = keys.get("no_rope_layers", list, None)
        # despite the name, 1 stands for a layer with RoPE
        if listed is not None and (len(listed) < layers or any(value not in (0, 1) for value in listed)):
            raise keys.error(
                f"no_rope_layers must have a 0 or 1 for each of {layers} layers, got {shown(listed)}"
            )
        if period < 1:
            raise keys.error(f"no_rope_layer_interval must be at least 1, got {period}")
        # a tuple of any number of layers would be made before that number is checked
        no_rope = range(period - 1, min(layers, MOST_LAYERS), period)
        if listed is not None:
            no_rope = (layer for layer in range(layers) if not listed[layer])
        return super().fields(keys) | {"no_rope": tuple(no_rope)}

    def keys(self, config: Any) -> dict[str, Any]:
        with_rope = [int(layer not in config.no_rope) for layer in range(config.num_layers)]
        # transformers' default for pad_token_id is not null
        return super().keys(config) | {"no_rope_layers": with_rope, "pad_token_id": None}
