"""Small models of every family and rope type, as Hugging Face folders with weights from NumPy's random generator.

Sizes are irregular on purpose: a head_dim other than width / heads, one kv head, as many kv heads as heads, three
layers, and a vocabulary that no mesh divides. Rope lengths are short, so that 512 tokens reach every branch of the
scaling.
"""

import json
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

TOKENS = 512
VOCABULARY = 61
POSITIONS = (0, 1, 2, 17, 130, 255, 384, 511)
"""The positions that goldens hold."""

IDS = {"bos_token_id": 1, "eos_token_id": 2}

LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
PHI3 = LLAMA | IDS | {"model_type": "phi3", "hidden_size": 64, "pad_token_id": None, "sliding_window": None}
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.4],
    "long_factor": [1.1, 1.5, 2.0, 4.0, 6.5, 8.0],
}
PHI4_MINI = PHI3 | {"partial_rotary_factor": 0.75, "rope_scaling": LONGROPE}
QWEN3 = LLAMA | {"model_type": "qwen3", "num_attention_heads": 6, "head_dim": 16, "rope_theta": 1e6}

GEMMA3 = {key: value for key, value in LLAMA.items() if key not in ("hidden_act", "tie_word_embeddings")} | {
    "model_type": "gemma3_text",
    "num_hidden_layers": 8,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 100,
    "sliding_window_pattern": 3,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "pad_token_id": None,
}

CASES = {
    # as published, it has no rope_theta and no num_key_value_heads
    "llama2": {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"},
    "llama3": LLAMA | {"rope_theta": 500000.0, "head_dim": 12},
    "llama31": LLAMA | {"rope_theta": 500000.0, "head_dim": 16, "rope_scaling": LLAMA3_ROPE},
    "llama32": LLAMA
    | {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 10000.0}, "head_dim": 32, "tie_word_embeddings": True},
    "linear": LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}, "num_key_value_heads": 1},
    "dynamic": LLAMA
    | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 128},
    "yarn": LLAMA
    | {
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    },
    "yarn_numbers": LLAMA
    | {
        "head_dim": 20,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
            "truncate": False,
        },
    },
    "biases": LLAMA | {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"},
    "qwen2": LLAMA
    | {
        "model_type": "qwen2",
        "num_key_value_heads": 1,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": 64,
    },
    "qwen3": QWEN3 | {"tie_word_embeddings": True},
    "qwen3_biases": QWEN3 | {"attention_bias": True, "num_key_value_heads": 6, "hidden_act": "gelu"},
    # one layer has full attention, and two have a sliding window
    "qwen2_window": LLAMA
    | {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 100,
        "max_window_layers": 1,
        "rope_theta": 1e6,
    },
    "mistral_window": LLAMA | {"model_type": "mistral", "head_dim": 16, "sliding_window": 100},
    "ministral": LLAMA
    | {
        "model_type": "ministral",
        "num_hidden_layers": 5,
        "head_dim": 16,
        "sliding_window": 100,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
    },
    "gemma3": GEMMA3,
    # the window is longer than the context, but its layers have their own RoPE all the same
    "gemma3_long": GEMMA3
    | {
        "sliding_window": 4096,
        "num_hidden_layers": 4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "qwen3_moe": QWEN3
    | {
        "model_type": "qwen3_moe",
        "intermediate_size": 24,
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
    },
    "gpt_oss": {key: value for key, value in LLAMA.items() if key != "hidden_act"}
    | {
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "intermediate_size": 24,
        "head_dim": 16,
        "sliding_window": 100,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "rope_theta": 150000.0,
        "max_position_embeddings": 1024,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
    },
    "mistral": LLAMA | {"model_type": "mistral", "head_dim": 16, "sliding_window": None, "rope_theta": 1e6},
    "smollm3": LLAMA
    | {
        "model_type": "smollm3",
        "num_hidden_layers": 5,
        "pad_token_id": None,
        "no_rope_layers": [1, 1, 0, 1, 1],
    },
    "phi3": PHI3,
    # 512 tokens are within the first original length, and above the second
    "longrope_short": PHI4_MINI | {"original_max_position_embeddings": 512},
    "longrope_long": PHI4_MINI | {"original_max_position_embeddings": 128},
}


def hf_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a model by name, as in Hugging Face's modules and independent of kvjax."""
    family = config["model_type"]
    d, f, n = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    k = config.get("num_key_value_heads", n)
    h = config.get("head_dim", d // n)
    qkv_bias = config.get("attention_bias", family in ("qwen2", "gpt_oss"))
    layer = {
        "input_layernorm.weight": (d,),
        "post_attention_layernorm.weight": (d,),
        "self_attn.q_proj.weight": (n * h, d),
        "self_attn.k_proj.weight": (k * h, d),
        "self_attn.v_proj.weight": (k * h, d),
        "self_attn.o_proj.weight": (d, n * h),
        "mlp.gate_proj.weight": (f, d),
        "mlp.up_proj.weight": (f, d),
        "mlp.down_proj.weight": (d, f),
    }
    if qkv_bias:
        layer |= {"self_attn.q_proj.bias": (n * h,)}
        layer |= {"self_attn.k_proj.bias": (k * h,), "self_attn.v_proj.bias": (k * h,)}
    if qkv_bias and family != "qwen2":
        layer |= {"self_attn.o_proj.bias": (d,)}
    if config.get("mlp_bias"):
        layer |= {"mlp.gate_proj.bias": (f,), "mlp.up_proj.bias": (f,), "mlp.down_proj.bias": (d,)}
    if family == "gemma3_text":
        layer |= {f"{which}_feedforward_layernorm.weight": (d,) for which in ("pre", "post")}
    if family in ("qwen3", "qwen3_moe", "gemma3_text"):
        layer |= {"self_attn.q_norm.weight": (h,), "self_attn.k_norm.weight": (h,)}
    if family == "qwen3_moe":
        f = config["moe_intermediate_size"]
        sizes = {"gate": (f, d), "up": (f, d), "down": (d, f)}
        for part, size in sizes.items():
            del layer[f"mlp.{part}_proj.weight"]
            layer |= {f"mlp.experts.{e}.{part}_proj.weight": size for e in range(config["num_experts"])}
        layer["mlp.gate.weight"] = (config["num_experts"], d)
    if family == "gpt_oss":
        e = config["num_local_experts"]
        for part in ("gate", "up", "down"):
            del layer[f"mlp.{part}_proj.weight"]
        layer |= {"self_attn.sinks": (n,), "mlp.router.weight": (e, d), "mlp.router.bias": (e,)}
        layer |= {"mlp.experts.gate_up_proj": (e, d, 2 * f), "mlp.experts.gate_up_proj_bias": (e, 2 * f)}
        layer |= {"mlp.experts.down_proj": (e, f, d), "mlp.experts.down_proj_bias": (e, d)}
    if family == "phi3":
        for part in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up"):
            del layer[f"{part}_proj.weight"]
        layer |= {"self_attn.qkv_proj.weight": ((n + 2 * k) * h, d), "mlp.gate_up_proj.weight": (2 * f, d)}
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], d), "model.norm.weight": (d,)}
    if not config.get("tie_word_embeddings", family == "gemma3_text"):
        shapes["lm_head.weight"] = (config["vocab_size"], d)
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def weights(config: dict) -> dict[str, np.ndarray]:
    """Return seeded weights, scaled so that attention is uneven and logits are a few units."""
    tensors = {}
    for name, shape in hf_shapes(config).items():
        x = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
        if name.endswith("norm.weight"):
            x = 0.2 * x if config["model_type"] == "gemma3_text" else 1 + 0.2 * x
        elif name.endswith("bias"):
            x = 0.3 * x
        elif name == "model.embed_tokens.weight":
            x = 0.5 * x
        else:
            gain = 2.0 if any(part in name for part in ("q_proj", "k_proj", "qkv_proj")) else 1.0
            x = gain * x / np.sqrt(shape[-1])
        tensors[name] = x.astype(np.float32)
    return tensors


def write_folder(folder: Path, config: dict, tensors: dict[str, np.ndarray] | None = None) -> Path:
    """Write a Hugging Face folder with one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = weights(config) if tensors is None else tensors
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tokens() -> np.ndarray:
    """Return one sequence of `TOKENS` ids, int32 [1, t]."""
    return np.random.default_rng(5).integers(0, VOCABULARY, (1, TOKENS), dtype=np.int32)
