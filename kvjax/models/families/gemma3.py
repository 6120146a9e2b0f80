"""Gemma 3 (arXiv:2503.19786): five sliding-window layers for each full-attention layer, with different RoPE; norms also
after attention and MLP."""

import math
from typing import Any, ClassVar

from kvjax.models.families.family import Family
from kvjax.models.families.windows import (
    FULL,
    SLIDING,
    Windows,
    all_layers,
    layer_keys,
    listed_layers,
    window_of,
)
from kvjax.models.json_file import JsonObject
from kvjax.models.rope import RopeConfig
from kvjax.models.rope_json import read_rope


class Gemma3(Family):
    model_type = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    gguf = "gemma3"
    gguf_windows = True
    gguf_norm_offset = 1.0
    multimodal = "gemma3"
    names: ClassVar = {
        "attention_post_norm.scale": "post_attention_layernorm.weight",
        "mlp_norm.scale": "pre_feedforward_layernorm.weight",
        "mlp_post_norm.scale": "post_feedforward_layernorm.weight",
    }
    # published files leave out keys whose values are those of the 4B model
    defaults: ClassVar = {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10_000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    }
    default_theta = 1_000_000.0

    def fields(self, keys: JsonObject) -> dict[str, Any]:
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            if keys.get(name, float, None) is not None:
                raise keys.error(f"{name} is not supported, only null")
        if keys.get("use_bidirectional_attention", bool, False):
            raise keys.error("use_bidirectional_attention is not supported")
        scalar = keys.get("query_pre_attn_scalar", float)
        if not scalar > 0:
            raise keys.error(f"query_pre_attn_scalar must be above 0, got {scalar:g}")
        bias = keys.get("attention_bias", bool, False)
        return {
            "qk_norm": True,
            "attention_bias": bias,
            "attention_out_bias": bias,
            "activation": keys.get("hidden_activation", str),
            "norm_offset": 1.0,
            "post_norms": True,
            "embed_factor": math.sqrt(max(keys.get("hidden_size", int), 0)),
            "query_factor": math.sqrt(max(keys.get("head_dim", int), 0) / scalar),
            "sliding_rope": read_rope(_rope_keys(keys, SLIDING), None),
        }

    def rope(self, keys: JsonObject, max_length: int | None) -> RopeConfig:
        return read_rope(_rope_keys(keys, FULL), max_length, theta=self.default_theta)

    def windows(self, keys: JsonObject) -> Windows:
        period = keys.get("sliding_window_pattern", int)
        if period < 1:
            raise keys.error(f"sliding_window_pattern must be at least 1, got {period}")
        layers = [layer for layer in all_layers(keys) if (layer + 1) % period]
        return window_of(keys, None), listed_layers(keys, layers)

    def keys(self, config: Any) -> dict[str, Any]:
        # transformers' default for pad_token_id is not null
        return {
            "attention_bias": config.attention_bias,
            "hidden_activation": config.activation,
            "query_pre_attn_scalar": round(config.head_dim / config.query_factor**2),
            "rope_local_base_freq": config.sliding_rope.theta,
            "pad_token_id": None,
        } | layer_keys(config)

    def gguf_keys(self, file: Any) -> dict[str, Any]:
        scalar = file.get("attention.key_length", int, 256)
        # as in llama.cpp, which recognises the 27B model by its number of layers
        if file.get("block_count", int) == 62:
            scalar = file.get("embedding_length", int) // max(file.get("attention.head_count", int), 1)
        return {
            "query_pre_attn_scalar": scalar,
            "rope_local_base_freq": file.get("rope.freq_base_swa", float, 10_000.0),
        }


def _rope_keys(keys: JsonObject, kind: str) -> JsonObject:
    """Return the RoPE keys of one kind of layers, from either spelling of transformers."""
    theta = "rope_theta" if kind == FULL else "rope_local_base_freq"
    rope = keys.get("rope_parameters", dict, {})
    if rope.keys() & {FULL, SLIDING}:
        rope = JsonObject(rope, f"{keys.where}: rope_parameters").get(kind, dict, {})
    elif kind == SLIDING:
        rope = {}
    if kind == FULL:
        rope = rope | keys.get("rope_scaling", dict, {})
    rope = {"rope_theta": keys.data.get(theta)} | rope
    context = {"max_position_embeddings": keys.get("max_position_embeddings", int)}
    return JsonObject(context | {"rope_parameters": rope}, keys.where)
