"""gpt-oss (arXiv:2508.10925): layers with a sliding window in turn with full attention, attention sinks without keys,
and mixtures of experts, whose files hold all of a layer's in one tensor, often in MXFP4."""

import math
from collections.abc import Iterator
from typing import Any, ClassVar

from kvjax.errors import UserError
from kvjax.models.families.family import Family
from kvjax.models.families.windows import Windows, all_layers, listed_layers, window_of
from kvjax.models.json_file import JsonObject
from kvjax.models.mxfp4 import ExpertOfTensor

FUSED = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


class GptOss(Family):
    model_type = "gpt_oss"
    architecture = "GptOssForCausalLM"
    quantised = ("mxfp4",)
    names: ClassVar = {
        "router": "mlp.router.weight",
        **{part: f"mlp.experts.{{expert}}.{part}_proj.weight" for part in ("gate", "up", "down")},
        **{f"{part}_bias": f"mlp.experts.{{expert}}.{part}_proj.bias" for part in ("gate", "up", "down")},
    }
    defaults: ClassVar = {
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "num_experts_per_tok": 4,
        "attention_bias": True,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }
    default_theta = 150_000.0

    def fields(self, keys: JsonObject) -> dict[str, Any]:
        bias, count = keys.get("attention_bias", bool), keys.get("num_local_experts", int)
        if count < 1:
            raise keys.error(f"num_local_experts must be at least 1, got {count}")
        return {
            "attention_bias": bias,
            "attention_out_bias": bias,
            "attention_sinks": True,
            "num_experts": count,
            "experts_per_token": keys.get("num_experts_per_tok", int),
            # a softmax over the chosen alone
            "norm_expert_weights": True,
            "expert_bias": True,
            "swiglu": (keys.get("swiglu_alpha", float), keys.get("swiglu_limit", float)),
        }

    def windows(self, keys: JsonObject) -> Windows:
        return window_of(keys, None), listed_layers(keys, all_layers(keys)[::2])

    def keys(self, config: Any) -> dict[str, Any]:
        raise UserError("models of the form gpt_oss are read, but not written")

    def text_tensors(self, stored: dict[str, Any]) -> dict[str, Any]:
        found = {}
        for name, tensor in stored.items():
            base, _, form = (
                name.rpartition("_") if name.endswith(("_blocks", "_scales", "_bias")) else (name, "", "")
            )
            if not base.endswith(FUSED):
                found[name] = tensor
            elif form != "scales":
                found |= _experts(base, form, tensor, stored.get(f"{base}_scales"))
        return found


def _experts(base: str, form: str, tensor: Any, scales: Any) -> Iterator[tuple[str, ExpertOfTensor]]:
    """Yield the tensors of the experts of one layer, given the one that holds them all and, of blocks, their scales."""
    if form == "blocks" and scales is None:
        raise UserError(f"{tensor.file}: {tensor.name} is there without its scales")
    before, _, part = base.rpartition(".")
    parts = ("gate", "up") if part == "gate_up_proj" else ("down",)
    kind = "bias" if form == "bias" else "weight"
    # a tensor without numbers could name any number of experts
    for expert in range(tensor.shape[0] if math.prod(tensor.shape) and len(tensor.shape) in (2, 3, 4) else 0):
        for first, own in enumerate(parts):
            yield (
                f"{before}.{expert}.{own}_proj.{kind}",
                ExpertOfTensor.of(tensor, scales if form == "blocks" else None, expert, first, len(parts)),
            )
