"""Small GGUF files, written as by llama.cpp's `convert_hf_to_gguf.py`, independent of kvjax's names and layouts."""

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}


GEMMA3 = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""Gemma 3's names that differ from those of most families."""


def gguf_name(name: str, arch: str = "llama") -> str:
    """Return llama.cpp's name of a Hugging Face tensor."""
    module, suffix = name.rsplit(".", 1)
    if not module.startswith("model.layers."):
        return f"{NAMES[module]}.{suffix}"
    _, _, layer, module = module.split(".", 3)
    names = NAMES | (GEMMA3 if arch == "gemma3" else {})
    return f"blk.{layer}.{names[module]}.{suffix}"


def permute(x: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of q or k in llama.cpp's order, as its `LlamaModel.permute` does."""
    return x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def rope_factors(config: dict) -> np.ndarray | None:
    """Return the factors that llama.cpp writes as rope_freqs.weight, by the formula of its converter."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if rope.get("rope_type") != "llama3":
        return None
    theta = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    factor, low, high = (rope[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    length = rope["original_max_position_embeddings"]
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < length / high:
            factors.append(1.0)
        elif wavelength > length / low:
            factors.append(factor)
        else:
            smooth = (length / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def write_gguf(
    file: Path,
    config: dict,
    tensors: dict[str, np.ndarray],
    kinds: dict[str, tuple[Kind, np.ndarray]] | None = None,
    metadata: dict | None = None,
    more: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write a GGUF file of a Hugging Face config and its tensors.

    Args:
        kinds: by Hugging Face's name, the type and the quantised bytes that replace a tensor.
        metadata: additional or changed pairs; None removes one.
        more: additional tensors by llama.cpp's names without ".weight".
    """
    arch = config["model_type"].removesuffix("_text").replace("_moe", "moe")
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    pairs = {
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": kv_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{arch}.rope.freq_base": float(rope.get("rope_theta", config.get("rope_theta", 10_000.0))),
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.rope.dimension_count": int(head_dim * config.get("partial_rotary_factor", 1.0)),
        "tokenizer.ggml.bos_token_id": config.get("bos_token_id"),
        "tokenizer.ggml.eos_token_id": config.get("eos_token_id"),
    }
    if arch == "gemma3":
        pairs["gemma3.attention.sliding_window"] = config["sliding_window"]
    if arch == "qwen3moe":
        pairs["qwen3moe.expert_count"] = count = config["num_experts"]
        pairs["qwen3moe.expert_used_count"] = config["num_experts_per_tok"]
        pairs["qwen3moe.expert_feed_forward_length"] = config["moe_intermediate_size"]
        # all experts of a layer are in one tensor
        first = [name for name in tensors if ".experts.0." in name]
        stacked = {
            name.replace("experts.0.", "experts."): np.stack(
                [tensors[name.replace("experts.0.", f"experts.{e}.")] for e in range(count)]
            )
            for name in first
        }
        tensors = {name: x for name, x in tensors.items() if ".experts." not in name} | stacked
    kind = rope.get("rope_type", rope.get("type"))
    if kind in ("linear", "yarn"):
        pairs |= {f"{arch}.rope.scaling.type": kind, f"{arch}.rope.scaling.factor": rope["factor"]}
        pairs[f"{arch}.rope.scaling.original_context_length"] = rope.get("original_max_position_embeddings")
    if kind == "longrope":
        pairs[f"{arch}.rope.scaling.original_context_length"] = config["original_max_position_embeddings"]
        pairs[f"{arch}.rope.scaling.attn_factor"] = rope["attention_factor"]
        lengths = {name: np.array(rope[f"{name}_factor"], np.float32) for name in ("long", "short")}
        more = (more or {}) | {f"rope_factors_{name}": factors for name, factors in lengths.items()}
    writer = gguf.GGUFWriter(file, arch)
    adds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for name, value in (pairs | (metadata or {})).items():
        if value is not None:
            adds.get(type(value), writer.add_array)(name, value)
    for name, x in tensors.items():
        if kinds and name in kinds:
            raw, x = kinds[name]
        else:
            raw = None
            if arch == "llama" and "self_attn.q_proj" in name:
                x = permute(x, heads)
            if arch == "llama" and "self_attn.k_proj" in name:
                x = permute(x, kv_heads)
        if arch == "gemma3" and name.endswith("norm.weight"):
            x = x + 1
        writer.add_tensor(gguf_name(name, arch), np.ascontiguousarray(x), raw_dtype=raw)
    factors = rope_factors(config)
    more = (more or {}) | ({} if factors is None else {"rope_freqs": factors})
    for name, x in more.items():
        writer.add_tensor(f"{name}.weight", x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def random_blocks(kind: Kind, shape: tuple[int, int]) -> np.ndarray:
    """Return random bytes of a quantised matrix whose scales are finite numbers."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(kind.value).integers(0, 256, (shape[0], shape[1] // block, size), np.uint8)
    # offsets of the float16 scales in ggml's block_q2_K … block_q6_K
    scales = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    for offset in scales[kind.name]:
        blocks[..., offset : offset + 2] = np.full(1, 0.02, np.float16).view(np.uint8)
    return blocks.reshape(shape[0], -1)


def quantised(name: str, x: np.ndarray) -> tuple[Kind, np.ndarray]:
    kind = Kind[name]
    return kind, random_blocks(kind, x.shape) if name.endswith("_K") else gguf.quants.quantize(x, kind)
