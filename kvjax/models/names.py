"""Hugging Face's names of the unfused arrays. Hugging Face stores the matrix of a linear map as [outputs, inputs].

These names are the ones that most families share; `Family.names` has the exceptions.
"""

import re
from typing import Any

import jax

LAYER = {
    "attention_norm.scale": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "q_norm.scale": "self_attn.q_norm.weight",
    "k_norm.scale": "self_attn.k_norm.weight",
    "mlp_norm.scale": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "sinks": "self_attn.sinks",
    "router": "mlp.gate.weight",
    "router_bias": "mlp.router.bias",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
}
MATRICES = "q", "k", "v", "o", "gate", "up", "down"
"""The matrices of a layer that can be in 8 bits."""
SCALES = "_scale_inv"
"""The suffix that makes the name of an FP8 matrix the name of its scales."""
TOP = {"embed": "model.embed_tokens.weight", "norm.scale": "model.norm.weight", "head": "lm_head.weight"}
TABLES = "embed", "head"
"""The tables of the vocabulary."""
EXPERT = "{expert}"
"""The place of an expert's index in a name."""


def layer_name(name: str, layer: int) -> str:
    """Return the full name of a layer's tensor."""
    return f"model.layers.{layer}.{name}"


def by_expert(name: str, experts: int) -> list[str]:
    """Return the names of the tensors that hold an array: one for each expert if `name` has a place for its index, or
    else `name` alone."""
    return [name.replace(EXPERT, str(expert)) for expert in range(experts)] if EXPERT in name else [name]


def canonical(name: str) -> str:
    """Return the name of a tensor in a causal language model. Like transformers, this accepts names without the prefix
    "model." and names that have it twice."""
    inner = name.removeprefix("model.").removeprefix("model.")
    return inner if inner.startswith("lm_head.") else f"model.{inner}"


def is_rotary_table(name: str, layers: int) -> bool:
    """Return True for the name of rotary frequencies, which older files hold once or for each of `layers` layers."""
    table = re.fullmatch(r"model\.(?:layers\.(\d{1,9})\.self_attn\.)?rotary_emb\.inv_freq", name)
    return table is not None and int(table[1] or 0) < layers


def by_path(model: Any) -> tuple[dict[str, Any], Any]:
    """Return the model's leaves by path, in the order of its tree, and the tree's structure. Paths in layers lack the
    prefix "layers."."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(model)
    # the last key of a path is the parameter's value inside its nnx.Param
    named = {".".join(key.name for key in path[:-1]).removeprefix("layers."): leaf for path, leaf in leaves}
    return named, tree


def in_layers(path: str) -> bool:
    """Return True for the path of an array in layers, which has a leading layer axis."""
    return path not in TOP and path.removesuffix("_scale") not in TABLES


Axis = str | tuple[str, ...] | None
"""The mesh axis or axes that split an array's axis; None if none does."""


def split(path: str, leaf: Any) -> tuple[Axis, Axis]:
    """Return the mesh axes that split the rows and the columns of a file's tensors, given the decoder's array `leaf`
    that holds them. `leaf` has a leading layer axis if it is in layers."""
    spec = jax.typeof(leaf).sharding.spec
    if not in_layers(path):
        return spec[0], spec[-1]
    return spec[-1], spec[1] if len(spec) == 3 else None
