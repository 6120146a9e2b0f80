"""Qwen3's mixtures of experts (arXiv:2505.09388), such as Qwen3-30B-A3B."""

from typing import Any, ClassVar

from kvjax.models.families.qwen3 import Qwen3
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
        return super().fields(keys) | {
            "mlp_width": keys.get("moe_intermediate_size", int),
            "num_experts": keys.get("num_experts", int, None) or keys.get("num_local_experts", int),
            "experts_per_token": keys.get("num_experts_per_tok", int),
            "norm_expert_weights": keys.get("norm_topk_prob", bool, False),
        }

    def keys(self, config: Any) -> dict[str, Any]:
        return super().keys(config) | {
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
            # as llama.cpp has it
            "norm_topk_prob": True,
        }
