"""The pieces that transformers' models compute. Torch is needed."""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers


def stages(folder: Path, tokens: np.ndarray, layer: int = 1) -> dict[str, np.ndarray]:
    """Return every piece of one layer and the model's outputs for `tokens` [1 t], in kvjax's layout without batch axis.

    x: the layer's input. norm: after its attention norm. cos, sin: one half of each, since the other half is the same.
    q, k: after RoPE. k_pre: before RoPE. v. attention: the sum that it adds to x. mlp_in, mlp: the mlp's input and
    output. layer: its output. hidden: after the final norm. logits.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    block = model.model.layers[layer]
    attention, head_dim = block.self_attn, block.self_attn.head_dim
    seen = {}

    def keep(name, module):
        def hook(_, args, kwargs, output):
            seen[name] = output
            seen[f"{name} in"] = args[0] if args else kwargs.get("hidden_states")
            seen[f"{name} rope"] = kwargs.get("position_embeddings")

        module.register_forward_hook(hook, with_kwargs=True)

    for name in ("q_proj", "k_proj", "v_proj", "qkv_proj", "q_norm", "k_norm"):
        if hasattr(attention, name):
            keep(name, getattr(attention, name))
    keep("norm", block.input_layernorm)
    keep("attention", attention)
    keep("mlp", block.mlp)
    keep("layer", block)
    keep("hidden", model.model.norm)
    with torch.no_grad():
        logits = model(torch.tensor(tokens, dtype=torch.long)).logits
        if "qkv_proj" in seen:
            config = model.config
            sizes = [n * head_dim for n in (config.num_attention_heads, *[config.num_key_value_heads] * 2)]
            seen |= zip(("q_proj", "k_proj", "v_proj"), seen["qkv_proj"].split(sizes, -1), strict=True)

        def heads(name):
            x = seen.get(f"{name}_norm", seen[f"{name}_proj"])
            if x.ndim == 4 and x.shape[2] == tokens.shape[1]:
                return x  # Gemma's norms come after the transposition
            return x.view(1, x.shape[1], -1, head_dim).transpose(1, 2)

        cos, sin = seen["layer rope"]
        rotary = sys.modules[type(attention).__module__].apply_rotary_pos_emb
        q, k = rotary(heads("q"), heads("k"), cos, sin)
    # gpt-oss computes only one half
    half = cos.shape[-1] if cos.shape[-1] < head_dim and "qkv_proj" not in seen else cos.shape[-1] // 2
    found = {
        "x": seen["layer in"],
        "norm": seen["norm"],
        "cos": cos[..., :half],
        "sin": sin[..., :half],
        "q": q,
        "k": k,
        "k_pre": heads("k"),
        "v": heads("v"),
        "attention": seen["attention"][0],
        "mlp_in": seen["mlp in"],
        "mlp": seen["mlp"][0] if isinstance(seen["mlp"], tuple) else seen["mlp"],
        "layer": seen["layer"],
        "hidden": seen["hidden"],
        "logits": logits,
    }
    return {name: x[0].numpy().astype(np.float32) for name, x in found.items()}
