"""Which Hugging Face tensor each parameter is, and how one is laid out as the other.

Hugging Face stores a linear map as [outputs, inputs], heads flattened; here inputs come first and heads have an axis of
their own, so that a `PartitionSpec` can name it.
"""

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvjax.mesh import P


@dataclasses.dataclass(frozen=True)
class Name:
    """A tensor's name in a Hugging Face file, and how many of our leading axes are its inputs (0: it is a vector)."""

    hf: str
    """Within its layer."""
    inputs: int = 0
    """How many of our leading axes are its inputs; 0: it is a vector."""


LAYER = {
    "attention_norm.scale": Name("input_layernorm.weight"),
    "q": Name("self_attn.q_proj.weight", 1),
    "k": Name("self_attn.k_proj.weight", 1),
    "v": Name("self_attn.v_proj.weight", 1),
    "o": Name("self_attn.o_proj.weight", 2),
    "q_bias": Name("self_attn.q_proj.bias"),
    "k_bias": Name("self_attn.k_proj.bias"),
    "v_bias": Name("self_attn.v_proj.bias"),
    "o_bias": Name("self_attn.o_proj.bias"),
    "q_norm.scale": Name("self_attn.q_norm.weight"),
    "k_norm.scale": Name("self_attn.k_norm.weight"),
    "mlp_norm.scale": Name("post_attention_layernorm.weight"),
    "gate": Name("mlp.gate_proj.weight", 1),
    "up": Name("mlp.up_proj.weight", 1),
    "down": Name("mlp.down_proj.weight", 1),
    "gate_bias": Name("mlp.gate_proj.bias"),
    "up_bias": Name("mlp.up_proj.bias"),
    "down_bias": Name("mlp.down_proj.bias"),
}
TOP = {"embed": "model.embed_tokens.weight", "norm.scale": "model.norm.weight", "head": "lm_head.weight"}


def layer_name(path: str, layer: int) -> str:
    """The Hugging Face name of one layer's parameter."""
    return f"model.layers.{layer}.{LAYER[path].hf}"


def canonical(name: str) -> str:
    """Return the name of a tensor in a causal model. Like transformers, this takes the names of the model below its
    head, which lack the prefix "model.", and those that have it once too often."""
    inner = name.removeprefix("model.").removeprefix("model.")
    return inner if inner.startswith("lm_head.") else f"model.{inner}"


def is_rotary_table(name: str, layers: int) -> bool:
    """True for the rotary frequencies that older files hold, of each of so many layers or once for all."""
    table = re.fullmatch(r"model\.(?:layers\.(\d{1,9})\.self_attn\.)?rotary_emb\.inv_freq", name)
    return table is not None and int(table[1] or 0) < layers


def by_path(model: Any) -> tuple[dict[str, Any], Any]:
    """The model's leaves by their path in `LAYER` or `TOP`, in the order of its tree, and that tree."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(model)
    # the last key of a path is the parameter's value inside its nnx.Param
    named = {".".join(key.name for key in path[:-1]).removeprefix("layers."): leaf for path, leaf in leaves}
    return named, tree


def hf_shape(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in the file of one layer's parameter that is `shape` here."""
    inputs = LAYER[path].inputs
    outputs = math.prod(shape[inputs:])
    return (outputs, math.prod(shape[:inputs])) if inputs else (outputs,)


def split(path: str, leaf: Any) -> tuple[str | None, str | None]:
    """The mesh axes that split the rows and the columns of the file's tensor, as they split our parameter (a layer's
    with its leading layer axis). Of the inputs and of the outputs only the first axis is ever split."""
    spec = jax.typeof(leaf).sharding.spec
    if path in TOP:
        return spec[0], spec[-1]
    inputs = LAYER[path].inputs
    return spec[1 + inputs], spec[1] if inputs else None


def from_hf(path: str, x: Array, shape: tuple[int, ...], spec: tuple[Any, ...]) -> Array:
    """One layer's parameter of the given shape and split from the file's tensor, which is split accordingly."""
    inputs = LAYER[path].inputs
    # outputs first, then inputs; a vector has outputs alone
    x = jnp.reshape(x, (*shape[inputs:], *shape[:inputs]), out_sharding=P(*spec[inputs:], *spec[:inputs]))
    order = range(len(shape))
    last = len(shape) - inputs
    return jnp.transpose(x, (*order[last:], *order[:last]))


def to_hf(path: str, x: Array) -> Array:
    """The file's tensor from one layer's parameter; the inverse of `from_hf`."""
    inputs, shape, spec = LAYER[path].inputs, x.shape, jax.typeof(x).sharding.spec
    order = range(len(shape))
    x = jnp.transpose(x, (*order[inputs:], *order[:inputs]))
    axes = (spec[inputs], spec[0]) if inputs else (spec[0],)
    return jnp.reshape(x, hf_shape(path, shape), out_sharding=P(*axes))
