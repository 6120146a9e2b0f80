"""Phi-3, Phi-3.5 and Phi-4 (arXiv:2404.14219, 2412.08905): RoPE rotates only the first dimensions of a head, and files
hold queries, keys and values in one tensor, and gate and up in another."""

from typing import Any, ClassVar

from kvjax.errors import UserError
from kvjax.models.families.family import Family
from kvjax.models.families.windows import Windows, all_layers, window_of
from kvjax.models.json_file import JsonObject
from kvjax.models.rope import RopeConfig
from kvjax.models.rope_json import read_rope, rope_share

QKV, GATE_UP = "self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"


class Phi3(Family):
    model_type = "phi3"
    architecture = "Phi3ForCausalLM"
    gguf = "phi3"
    gguf_windows = True
    defaults: ClassVar = {"rms_norm_eps": 1e-5}
    names: ClassVar = {"q": QKV, "k": QKV, "v": QKV, "gate": GATE_UP, "up": GATE_UP}

    def windows(self, keys: JsonObject) -> Windows:
        return window_of(keys, None), all_layers(keys)

    def rope(self, keys: JsonObject, max_length: int | None) -> RopeConfig:
        return read_rope(keys, max_length, rope_share(keys), self.default_theta)

    def keys(self, config: Any) -> dict[str, Any]:
        if config.rope.type not in ("default", "longrope"):
            raise UserError(f"transformers reads no Phi-3 with rope type {config.rope.type}")
        # transformers' defaults for the last two differ
        return {
            "partial_rotary_factor": config.rope.share,
            "sliding_window": config.sliding_window or None,
            "original_max_position_embeddings": config.rope.original_length or config.max_position,
            "pad_token_id": None,
        }
