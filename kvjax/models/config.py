"""The shape of a model, and how it is read from and written to a Hugging Face `config.json`."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax

from kvjax.errors import UserError
from kvjax.models.rope import ROPE_TYPES, RopeConfig

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and flags of a decoder.

    width: of the residual stream (`hidden_size`). attention_bias: on q, k and v; attention_out_bias: on the output
    projection. tied: the output head is the embedding table. max_position: the context the model declares.
    eos_ids: every token that ends a sequence.

    Raises:
        UserError: heads that kv heads do not divide, an odd head_dim, an unknown activation or rope type.
    """

    vocab_size: int
    num_layers: int
    width: int
    mlp_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    qk_norm: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    tied: bool = False
    model_type: str = "llama"
    max_position: int = 4096
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"{self.num_kv_heads} kv heads do not divide {self.num_heads} query heads")
        if self.head_dim % 2:
            raise UserError(f"head_dim is {self.head_dim}, rotary embeddings need an even one")
        if self.activation not in ACTIVATIONS:
            raise UserError(f"activation {self.activation!r} is not supported, only {', '.join(ACTIVATIONS)}")
        if self.rope.type not in ROPE_TYPES:
            raise UserError(f"rope type {self.rope.type!r} is not supported, only {', '.join(ROPE_TYPES)}")
