"""Mixtures of experts of Qwen3 (arXiv:2505.09388), such as Qwen3-30B-A3B."""

from typing import Any, ClassVar

from kvjax.models.families.qwen3 import Qwen3
from kvjax.models.families.windows import Windows, all_layers, window_of
from kvjax.models.json_file import JsonObject


class Qwen3Moe(Qwen3):
    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    gguf = "qwen3moe"
    gguf_experts = True
    names: ClassVar = {part: f"mlp.experts.{{expert}}.{part}_proj.weight" for part in ("gate", "up", "down")}

    def fields(self, keys: JsonObject) -> dict[str, Any]:
        if keys.get("decoder_sparse_step", int, 1) != 1 or keys.get("mlp_only_layers", list, []):
            raise keys.error(
                "layers without experts (decoder_sparse_step, mlp_only_layers) are not supported"
            )
        count = keys.get("num_experts", int, keys.get("num_local_experts", int, 0))
        if count < 1:
            raise keys.error(f"num_experts must be at least 1, got {count}")
        return super().fields(keys) | {
            "mlp_width": keys.get("moe_intermediate_size", int),
            "num_experts": count,
            "experts_per_token": keys.get("num_experts_per_tok", int),
            "norm_expert_weights": keys.get("norm_topk_prob", bool, False),
        }

    def windows(self, keys: JsonObject) -> Windows:
        uses = keys.get("use_sliding_window", bool, False)
        return (window_of(keys, 4096), all_layers(keys)) if uses else (None, ())

    def keys(self, config: Any) -> dict[str, Any]:
        return {
            "attention_bias": config.attention_bias,
            "use_sliding_window": bool(config.sliding_layers),
            "sliding_window": config.sliding_window or None,
            "moe_intermediate_size": config.mlp_width,
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.experts_per_token,
            "norm_topk_prob": config.norm_expert_weights,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }

    def gguf_keys(self, file: Any) -> dict[str, Any]:
        return {
            "moe_intermediate_size": file.get("expert_feed_forward_length", int),
            "num_experts": file.get("expert_count", int),
            "num_experts_per_tok": file.get("expert_used_count", int),
            # as in llama.cpp
            "norm_topk_prob": True,
        }
