"""gpt-oss (arXiv:2508.10925): sliding-window layers alternating with full attention, attention sinks without keys, and
mixtures of experts. Files hold all experts of a layer in one tensor, often in MXFP4."""

import math
from collections.abc import Iterator
from typing import Any, ClassVar

from kvjax.errors import UserError
from kvjax.models.families.family import Family
from kvjax.models.families.windows import Windows, all_layers, listed_layers, window_of
from kvjax.models.json_file import JsonObject
from kvjax.models.mxfp4 import ExpertOfTensor
from kvjax.models.rope import RopeConfig

EXPERT_TENSORS = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
MOST_EXPERTS, MOST_TENSORS = 4096, 2**20
"""The most experts of a layer, and the most tensors of a model once experts are apart: each takes memory before the
weights are read."""


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
    default_rope: ClassVar = {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
    """The rotary embeddings of a file that has none."""

    def rope(self, keys: JsonObject, max_length: int | None) -> RopeConfig:
        if not any(keys.get(name, dict, None) for name in ("rope_scaling", "rope_parameters")):
            keys = JsonObject(keys.data | {"rope_scaling": self.default_rope}, keys.where)
        return super().rope(keys, max_length)

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
            # the model takes a softmax over the chosen experts alone
            "norm_expert_weights": True,
            "expert_bias": True,
            "swiglu": (keys.get("swiglu_alpha", float), keys.get("swiglu_limit", float)),
        }

    def windows(self, keys: JsonObject) -> Windows:
        return window_of(keys, None), listed_layers(keys, all_layers(keys)[::2])

    def keys(self, config: Any) -> dict[str, Any]:
        raise UserError("models of the form gpt_oss are read, but not written")

    def text_tensors(self, stored: dict[str, Any]) -> dict[str, Any]:
        tensors = {}
        for name, tensor in stored.items():
            base, _, suffix = (
                name.rpartition("_") if name.endswith(("_blocks", "_scales", "_bias")) else (name, "", "")
            )
            if not base.endswith(EXPERT_TENSORS):
                tensors[name] = tensor
            elif suffix != "scales":
                tensors |= _experts(base, suffix, tensor, stored.get(f"{base}_scales"))
            if len(tensors) > MOST_TENSORS:
                raise UserError(f"{tensor.file}: the experts have more than {MOST_TENSORS:,} tensors")
        return tensors


def _experts(base: str, suffix: str, tensor: Any, scales: Any) -> Iterator[tuple[str, ExpertOfTensor]]:
    """Yield the tensors of single experts, given the tensor that holds all experts of a layer, and the scales of its
    blocks if it is in MXFP4."""
    if suffix == "blocks" and scales is None:
        raise UserError(f"{tensor.file}: {tensor.name} is there without its scales")
    before, _, part = base.rpartition(".")
    parts = ("gate", "up") if part == "gate_up_proj" else ("down",)
    kind = "bias" if suffix == "bias" else "weight"
    if tensor.shape and tensor.shape[0] > MOST_EXPERTS:
        count = tensor.shape[0]
        raise UserError(
            f"{tensor.file}: {tensor.name} has {count:,} experts, expected at most {MOST_EXPERTS:,}"
        )
    # an empty tensor could have any number of experts
    for expert in range(tensor.shape[0] if math.prod(tensor.shape) and len(tensor.shape) in (2, 3, 4) else 0):
        for first, part_name in enumerate(parts):
            yield (
                f"{before}.{expert}.{part_name}_proj.{kind}",
                ExpertOfTensor.of(tensor, scales if suffix == "blocks" else None, expert, first, len(parts)),
            )
