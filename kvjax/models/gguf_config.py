"""The metadata of a GGUF file as the keys of a Hugging Face `config.json`."""

import math
from typing import Any

import numpy as np

from kvjax.errors import UserError
from kvjax.models.families import GGUF
from kvjax.models.gguf_file import FACTORS, GgufFile
from kvjax.models.json_file import JsonObject
from kvjax.models.rope import RopeConfig, inverse_frequencies
from kvjax.models.turn_ends import turn_ends

_NEUTRAL_VALUES = {
    "expert_count": (0,),
    "attention.scale": (0,),
    "attention.clamp_kqv": (0,),
    "logit_scale": (0, 1),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.scale_linear": (0, 1),
    "rope.scaling.yarn_attn_factor": (0,),
    "final_logit_softcapping": (0,),
    "attn_logit_softcapping": (0,),
    "pooling_type": (0,),
}
"""Keys of unsupported variants of an architecture, and the values with which they have no effect: 0 counts as a missing
key, and a factor of 1 changes nothing."""
_CONTROL, _USER_DEFINED = 3, 4
"""Token types."""


def config_keys(file: GgufFile) -> JsonObject:
    """Return the metadata as the keys of `config.json`. GGUF holds numbers as float32; they become the shortest
    decimals that round to them, which are the numbers before their conversion to GGUF.

    Raises:
        UserError: a key is missing or has a value that is not supported. The message has GGUF's name of the key.
    """
    family = GGUF[file.architecture]
    for name, neutral in _NEUTRAL_VALUES.items():
        if name == "expert_count" and family.gguf_experts:
            continue
        if (value := file.get(name, float, 0.0)) not in neutral:
            raise file.metadata.error(f"{file.architecture}.{name} is {value:g}, which is not supported")
    if not file.get("attention.causal", bool, True):
        raise file.metadata.error(f"{file.architecture}.attention.causal is false: it is an embedding model")
    heads, width = file.get("attention.head_count", int), file.get("embedding_length", int)
    head_dim = file.get("attention.key_length", int, width // max(heads, 1))
    values, rotated = (
        file.get(name, int, head_dim) for name in ("attention.value_length", "rope.dimension_count")
    )
    if values != head_dim:
        raise file.metadata.error(
            f"{file.architecture}.attention.value_length is {values}, but heads have {head_dim}"
        )
    embed = file.tensors.get("token_embd.weight")
    if embed is None:
        reason = "" if file.tensors else ", it has only a vocabulary"
        raise file.metadata.error(f"the tensor token_embd.weight is missing{reason}")
    context = file.get("context_length", int)
    window = file.get("attention.sliding_window", int, 0)
    if 0 < window < context and not family.gguf_windows:
        raise file.metadata.error(
            f"{file.architecture}.attention.sliding_window is {window}, which is not supported"
        )
    data = family.gguf_keys(file) | {
        "model_type": family.model_type,
        "vocab_size": embed.shape[0],
        "hidden_size": width,
        "intermediate_size": file.get("feed_forward_length", int),
        "num_hidden_layers": file.get("block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": file.get("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "rms_norm_eps": _decimal(file.get("attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _decimal(file.get("rope.freq_base", float, 10_000.0)),
        "rope_scaling": _rope_scaling(file, head_dim, rotated, context),
        "partial_rotary_factor": _share(rotated, head_dim),
        "max_position_embeddings": context,
        "sliding_window": window or None,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id", int, None),
        "eos_token_id": _eos_ids(file.metadata),
    }
    return JsonObject(data, str(file.path))


def _share(rotated: int, head_dim: int) -> float:
    """Return a share with int(head_dim · share) = `rotated`."""
    share = rotated / max(head_dim, 1)
    return share if int(head_dim * share) == rotated else math.nextafter(share, math.inf)


def _decimal(stored: float) -> float:
    return float(str(np.float32(stored)))


def _eos_ids(metadata: JsonObject) -> list[int]:
    """Return the tokens that end a text, a turn or a message, and those with which the chat template ends a turn."""
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id", int, None) for name in ("eos", "eot", "eom"))
    ids = {id_ for id_ in named if id_ is not None}
    if template := metadata.get("tokenizer.chat_template", str, ""):
        listed = metadata.get("tokenizer.ggml.tokens", list, [])
        types = metadata.get("tokenizer.ggml.token_type", list, [_CONTROL] * len(listed))
        tokens = {
            token: id_
            for id_, (token, type_) in enumerate(zip(listed, types, strict=False))
            if type_ in (_CONTROL, _USER_DEFINED)
        }
        special_ids = {
            f"{name}_token": metadata.get(f"tokenizer.ggml.{name}_token_id", int, None)
            for name in ("bos", "eos")
        }
        special = {
            name: listed[id_]
            for name, id_ in special_ids.items()
            if id_ is not None and 0 <= id_ < len(listed)
        }
        ids |= set(turn_ends(template, tokens, special).values())
    return sorted(ids)


def _rope_scaling(file: GgufFile, head_dim: int, rotated: int, context: int) -> dict[str, Any] | None:
    magnitude = file.get("rope.scaling.attn_factor", float, 0.0)
    if any(name in file.tensors for name in FACTORS):
        return _longrope(file, rotated // 2, context) | (
            {"attention_factor": _decimal(magnitude)} if magnitude else {}
        )
    if magnitude not in (0, 1):
        raise file.metadata.error(
            f"{file.architecture}.rope.scaling.attn_factor is {magnitude:g}, which is not supported"
        )
    # as in llama.cpp, a factor without a type means linear scaling
    has_factor = file.get("rope.scaling.factor", float, 0.0) not in (0, 1)
    kind = file.get("rope.scaling.type", str, "linear" if has_factor else "none")
    factors = file.tensors.get("rope_freqs.weight")
    if factors is not None:
        if kind != "none":
            raise file.metadata.error(
                f"rope_freqs.weight together with rope scaling {kind!r} is not supported"
            )
        return _llama3(file, head_dim)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise file.metadata.error(f"rope scaling {kind!r} is not supported, only linear and yarn")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": _decimal(file.get("rope.scaling.factor", float))}
    if kind == "yarn":
        if file.get("rope.scaling.yarn_log_multiplier", float, 0.0):
            raise file.metadata.error("yarn with a log multiplier is not supported")
        scaling["original_max_position_embeddings"] = file.get(
            "rope.scaling.original_context_length", int, None
        )
        for name in ("beta_fast", "beta_slow"):
            scaling[name] = file.get(f"rope.scaling.yarn_{name}", float, None)
    return scaling


def _longrope(file: GgufFile, pairs: int, context: int) -> dict[str, Any]:
    """Return LongRoPE's scaling. Its factors for each of `pairs` pairs are in two tensors."""
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": file.get("rope.scaling.original_context_length", int, context),
    }
    for name, key in FACTORS.items():
        tensor = file.tensors.get(name)
        if tensor is None or tensor.shape != (pairs,):
            problem = "missing" if tensor is None else f"of shape {tensor.shape}"
            raise file.metadata.error(f"{name} is {problem}, expected {(pairs,)}")
        scaling[key] = [_decimal(value) for value in tensor.read().tolist()]
    return scaling


def _llama3(file: GgufFile, head_dim: int) -> dict[str, Any] | None:
    """Return Llama 3's scaling, given its factors for each frequency, which are all that a GGUF file keeps.

    `factor` is the largest of them. `low_freq_factor` and `high_freq_factor` are assumed to be 1 and 4, and the
    original length is the power of two that gives the same factors. Anything else is refused.
    """
    tensor = file.tensors["rope_freqs.weight"]
    if tensor.shape != (head_dim // 2,):
        raise file.metadata.error(
            f"rope_freqs.weight is not Llama 3's scaling: its shape is {tensor.shape}, expected {(head_dim // 2,)}"
        )
    stored = np.zeros(tensor.shape, np.float32)
    tensor.fill(stored, 0)
    if (stored == 1).all():
        return None
    valid = ((stored > 0) & np.isfinite(stored)).all()
    factor = _decimal(float(stored.max()))
    theta = _decimal(file.get("rope.freq_base", float, 10_000.0))
    for length in (2**power for power in range(6, 21) if valid):
        try:
            rope = RopeConfig("llama3", theta, factor, length, low_freq_factor=1.0, high_freq_factor=4.0)
        except UserError as error:
            raise file.metadata.error(str(error)) from None
        factors = inverse_frequencies(RopeConfig(theta=theta), head_dim) / inverse_frequencies(rope, head_dim)
        if np.allclose(factors, stored, rtol=1e-5, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": rope.low_freq_factor,
                "high_freq_factor": rope.high_freq_factor,
                "original_max_position_embeddings": length,
            }
    raise file.metadata.error(
        "rope_freqs.weight is not Llama 3's scaling with low and high factors of 1 and 4 and an original length that "
        "is a power of two, which alone is supported"
    )
