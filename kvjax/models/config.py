"""The sizes and flags of a model. They are read from a Hugging Face `config.json` or a GGUF file, and written as a
`config.json`."""

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float32, Int

from kvjax.errors import LARGEST_INT, UserError, shown, warn
from kvjax.models import fp8
from kvjax.models.adapter import base_path
from kvjax.models.families import FAMILIES, MULTIMODAL, Family
from kvjax.models.families.windows import FULL, SLIDING
from kvjax.models.gguf_config import config_keys
from kvjax.models.gguf_file import GgufFile, is_gguf
from kvjax.models.json_file import JsonObject
from kvjax.models.rope import ROPE_TYPES, RopeConfig, attention_scaling, check_rotation, inverse_frequencies
from kvjax.models.rope_json import rope_scaling
from kvjax.models.tensor_files import has_own_head
from kvjax.models.turn_ends import folder_turn_ends
from pallas_kernels.eight_bits import EIGHT_BITS

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


_LARGEST_SIZES = {
    "vocab_size": 2**24,
    "num_layers": 10_000,
    "width": 2**24,
    "mlp_width": 2**24,
    "num_heads": 2**16,
    "num_kv_heads": 2**16,
    "head_dim": 2**16,
    "max_position": LARGEST_INT,
}
"""The largest sizes that are accepted, far beyond any existing model: a small file must not cause unlimited work."""

SHARED_KEYS = "bos_token_id", "eos_token_id", "tie_word_embeddings", "quantization_config"
"""Keys of a multimodal model's config that also apply to its text model."""

FAMILY_FIELDS = {
    "qk_norm": False,
    "attention_bias": False,
    "attention_out_bias": False,
    "mlp_bias": False,
    "no_rope": (),
    "sliding_rope": None,
    "num_experts": 0,
    "experts_per_token": 0,
    "norm_expert_weights": False,
    "expert_bias": False,
    "swiglu": None,
    "attention_sinks": False,
    "norm_offset": 0.0,
    "post_norms": False,
    "embed_factor": 1.0,
    "query_factor": 1.0,
}
"""Fields of `ModelConfig` that only some families set, with their values for all other families."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and flags of a decoder.

    Raises:
        UserError: a number is out of range, the kv heads do not divide the query heads, head_dim is odd, or the
            activation or rope type is unknown.
    """

    vocab_size: int
    """Rows of the embedding table."""
    num_layers: int
    """Decoder layers."""
    width: int
    """The width of the residual stream (`hidden_size`)."""
    mlp_width: int
    """The width of the hidden layer of the MLP or of one expert (`intermediate_size`)."""
    num_heads: int
    """Query heads of a layer."""
    num_kv_heads: int
    """Key and value heads of a layer."""
    head_dim: int
    """The dimension of a head's queries, keys and values."""
    norm_eps: float = 1e-6
    """The epsilon of the RMS norms."""
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    """The rotary position embeddings of queries and keys."""
    no_rope: tuple[int, ...] = ()
    """The layers without RoPE (NoPE)."""
    sliding_window: int = 0
    """The number of tokens that a sliding-window layer sees, including the query's; 0 if there are no such layers."""
    sliding_layers: tuple[int, ...] = ()
    """The layers with a sliding window, in order. The others see all tokens (full attention)."""
    sliding_rope: RopeConfig | None = None
    """The rotary position embeddings of the sliding-window layers; None: the same as in the other layers."""
    qk_norm: bool = False
    """True if queries and keys are normalised before RoPE."""
    attention_bias: bool = False
    """True if the projections to q, k and v have biases."""
    attention_out_bias: bool = False
    """True if attention's output projection has a bias."""
    mlp_bias: bool = False
    """True if the MLP's projections have biases."""
    norm_offset: float = 0.0
    """The number added to the weights of RMS norms."""
    post_norms: bool = False
    """True if the outputs of attention and MLP are also normalised before they are added to the residual stream."""
    embed_factor: float = 1.0
    """The factor that embeddings are multiplied by."""
    query_factor: float = 1.0
    """The factor that queries are multiplied by, in addition to attention's 1/√head_dim."""
    num_experts: int = 0
    """Experts of a layer; 0: a layer has one MLP and no router."""
    experts_per_token: int = 0
    """Experts that the router chooses for each token."""
    norm_expert_weights: bool = False
    """True if the weights of the chosen experts are divided by their sum."""
    expert_bias: bool = False
    """True if the router and the experts have biases."""
    swiglu: tuple[float, float] | None = None
    """The slope and the limit of the clamped SwiGLU that experts use instead of `activation`; None: they use
    `activation`."""
    attention_sinks: bool = False
    """True if each query head adds a learned logit to every softmax (an attention sink without a key)."""
    activation: str = "silu"
    """The MLP's activation, one of `ACTIVATIONS`."""
    weights: str | None = None
    """The 8-bit dtype of the layers' matrices, "int8" or "fp8"; None: the dtype of the other parameters."""
    weight_block: int = 0
    """The number of inputs that share a scale of 8-bit weights; 0: all inputs share one."""
    kv_cache_dtype: str | None = None
    """"int8": the cache holds int8 entries; None: in the dtype of activations."""
    head_order: tuple[tuple[int, ...], ...] | None = dataclasses.field(default=None, repr=False)
    """For each layer with full attention, the KV head (numbered as in the model's files) stored at each place
    (`kvjax.inference.placement`); None: the order of the files."""
    tied: bool = False
    """True if the output head is the embedding table."""
    model_type: str = "llama"
    """Hugging Face's `model_type`, one of `FAMILIES`."""
    max_position: int = 4096
    """The context length that the model declares; with dual chunk attention, which is not supported, the length of one
    chunk."""
    bos_id: int | None = None
    """The token that begins a text; None: texts begin without one."""
    eos_ids: tuple[int, ...] = ()
    """Every token that ends a sequence."""
    turn_ends: tuple[tuple[str, int], ...] = dataclasses.field(default=(), compare=False, repr=False)
    """The tokens of `eos_ids` that only the chat template names, with their ids."""
    name: str = dataclasses.field(default="", compare=False)
    """The path or hub id that the model was read from, for messages."""

    def __post_init__(self):
        for name, largest in _LARGEST_SIZES.items():
            if not 1 <= getattr(self, name) <= largest:
                bound = (
                    f"at least 1 and at most {largest:,}" if getattr(self, name) > largest else "at least 1"
                )
                raise UserError(f"{name} must be {bound}, got {getattr(self, name)}")
        if self.num_heads * self.head_dim > _LARGEST_SIZES["width"]:
            raise UserError(
                f"{self.num_heads:,} heads of {self.head_dim:,}, expected at most {_LARGEST_SIZES['width']:,} in all"
            )
        if not 0 <= self.norm_eps < 1:
            raise UserError(f"norm_eps must be at least 0 and below 1, got {self.norm_eps:g}")
        for id_ in (*self.eos_ids, *(() if self.bos_id is None else (self.bos_id,))):
            if not 0 <= id_ <= LARGEST_INT:
                raise UserError(f"a token id must be at least 0 and at most {LARGEST_INT}, got {id_}")
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"{self.num_kv_heads} kv heads do not divide {self.num_heads} query heads")
        if self.head_dim % 2:
            raise UserError(f"head_dim is {self.head_dim}, but rotary embeddings need an even one")
        if not 0 <= self.num_experts <= (largest := _LARGEST_SIZES["num_heads"]):
            raise UserError(f"num_experts must be at least 0 and at most {largest:,}, got {self.num_experts}")
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise UserError(
                f"experts_per_token must be at least 1 and at most {self.num_experts}, got {self.experts_per_token}"
            )
        if any(not 0 <= layer < self.num_layers for layer in self.sliding_layers):
            raise UserError(
                f"sliding_layers must be from 0 to {self.num_layers - 1}, got {shown(self.sliding_layers)}"
            )
        if self.sliding_layers and not 2 <= self.sliding_window <= LARGEST_INT:
            raise UserError(
                f"sliding_window must be at least 2 and at most {LARGEST_INT}, got {self.sliding_window}"
            )
        if self.weights not in (None, *EIGHT_BITS):
            raise UserError(f"weights must be {' or '.join(EIGHT_BITS)}, got {shown(self.weights)}")
        if self.weight_block:
            self._check_weight_blocks()
        if self.kv_cache_dtype not in (None, "int8"):
            raise UserError(f"kv_cache_dtype must be int8, got {shown(self.kv_cache_dtype)}")
        if self.activation not in ACTIVATIONS:
            raise UserError(f"activation {self.activation!r} is not supported, only {', '.join(ACTIVATIONS)}")
        if self.rope.type not in ROPE_TYPES:
            raise UserError(f"rope type {self.rope.type!r} is not supported, only {', '.join(ROPE_TYPES)}")
        for rope in (self.rope, *(() if self.sliding_rope is None else (self.sliding_rope,))):
            check_rotation(rope, self.head_dim)
        if not 1e-3 <= self.query_factor <= 1e3:
            raise UserError(
                f"the queries' factor must be at least 0.001 and at most 1000, got {self.query_factor:g}"
            )
        if self.longest > LARGEST_INT:
            raise UserError(f"rope factor and original length make a context of {self.longest:,} tokens")

    def _check_weight_blocks(self) -> None:
        inputs = {
            "hidden_size": self.width,
            "intermediate_size": self.mlp_width,
            "num_attention_heads · head_dim": self.num_heads * self.head_dim,
        }
        for name, size in inputs.items():
            if size % self.weight_block:
                raise UserError(
                    f"{name} must be a multiple of {self.weight_block}, the size of weight blocks, got {size}"
                )

    @property
    def slides(self) -> tuple[bool, ...]:
        """For each layer, True if it has a sliding window."""
        sliding = frozenset(self.sliding_layers)
        return tuple(layer in sliding for layer in range(self.num_layers))

    @property
    def full_layers(self) -> tuple[int, ...]:
        """The layers with full attention. Only these have retained entries, and only these are visible to policies."""
        return tuple(layer for layer, slides in enumerate(self.slides) if not slides)

    @property
    def head_at_place(self) -> Int[np.ndarray, "l k"]:
        """The KV head (numbered as in the model's files) at each place, for each layer with full attention."""
        if self.head_order is not None:
            return np.array(self.head_order, np.int32)
        return np.tile(np.arange(self.num_kv_heads, dtype=np.int32), (self.num_full_layers, 1))

    @property
    def place_of_head(self) -> Int[np.ndarray, "l k"]:
        """The place of each KV head: the inverse of `head_at_place`."""
        return np.argsort(self.head_at_place).astype(np.int32)

    @property
    def num_full_layers(self) -> int:
        """The number of layers with full attention."""
        return self.num_layers - len(self.sliding_layers)

    @property
    def int8_entries(self) -> bool:
        """True if a cache holds int8 entries."""
        return self.kv_cache_dtype == "int8"

    @property
    def longest(self) -> int:
        """The longest sequence in tokens: the declared context, or the context that RoPE is stretched to if that is
        longer."""
        return max(self.max_position, int(self.rope.factor * self.rope.original_length), self.rope.length)

    @property
    def layer_names(self) -> dict[str, str]:
        """Hugging Face's names of a layer's unfused arrays. Arrays that share a name are stored one after another in
        the rows of one tensor."""
        return FAMILIES[self.model_type].layer_names

    def with_weights(self, weights: str | None) -> "ModelConfig":
        """Return the configuration with the layers' matrices in this dtype; None keeps the dtype of the files.

        Raises:
            UserError: the dtype is unknown, or the files hold another 8-bit dtype.
        """
        if weights is None or weights == self.weights:
            return self
        if weights in EIGHT_BITS and self.weights is not None:
            raise UserError(
                f"weights must be {self.weights}, as in the model's files, or left out, got {weights}"
            )
        return dataclasses.replace(self, weights=weights)

    def rotation(self) -> tuple[Float32[np.ndarray, "l pairs"], Float32[np.ndarray, " l"]]:
        """Return RoPE's radians per position of each rotated pair and the factor of cosines and sines, for each layer
        with full attention."""
        has_rope = np.isin(self.full_layers, self.no_rope, invert=True)
        scale = np.where(has_rope, attention_scaling(self.rope), 1.0)
        frequencies = has_rope[:, None] * inverse_frequencies(self.rope, self.head_dim)
        return frequencies.astype(np.float32), scale.astype(np.float32)


def read_config(
    folder: str | Path,
    max_length: int | None = None,
    weights: str | None = None,
    kv_cache_dtype: str | None = None,
) -> ModelConfig:
    """Read the configuration of a model from a folder's `config.json` or from the metadata of a GGUF file.

    For an adapter, the config of its base model is read. Tied embeddings count as untied if the folder's weights hold
    an output head with other values.

    The eos ids of a folder come from `generation_config.json`, or from `config.json` if the former names none. The
    token with which the chat template ends a turn is added to them.

    A sliding window as long as the context counts as full attention.

    Args:
        folder: a folder with `config.json`, or a GGUF file.
        max_length: the longest sequence that will be run. Only the rope types "dynamic" and "longrope" use it, since
            their frequencies depend on it; by default `max_position_embeddings`.
        weights: as in `ModelConfig.with_weights`.
        kv_cache_dtype: as in `ModelConfig`.

    Raises:
        UserError: the file does not exist, a key is missing or has the wrong type, or the file asks for something that
            is not supported.
    """
    folder = base_path(Path(folder))
    keys = config_keys(GgufFile.read(folder)) if is_gguf(folder) else JsonObject.read(folder / "config.json")
    model_type = keys.get("model_type", str)
    if model_type in MULTIMODAL:
        text_config = keys.get("text_config", dict)
        model_type = MULTIMODAL[model_type].model_type
        shared = {name: keys.data[name] for name in SHARED_KEYS if keys.data.get(name) is not None}
        keys = JsonObject(text_config | shared | {"model_type": model_type}, f"{keys.where}: text_config")
    if model_type not in FAMILIES:
        raise keys.error(
            f"model_type {model_type!r} is not supported, only {', '.join([*FAMILIES, *MULTIMODAL])}"
        )
    family = FAMILIES[model_type]
    keys = JsonObject({**family.defaults, **keys.data}, keys.where)
    quantisation = JsonObject(keys.get("quantization_config", dict, {}), f"{keys.where}: quantization_config")
    method = quantisation.get("quant_method", str, None)
    if quantisation.data and method not in ("fp8", *family.quantised):
        raise keys.error(
            "quantized weights (quantization_config) are not supported, except FP8 in blocks: pass the unquantized "
            "model, which weights='int8' quantizes, or a GGUF file"
        )
    heads, width = keys.get("num_attention_heads", int), keys.get("hidden_size", int)
    generation = folder / "generation_config.json"
    eos = JsonObject.read(generation).ids("eos_token_id") if os.path.lexists(generation) else []
    eos = eos or keys.ids("eos_token_id")
    # `config_keys` has already added the turn ends of a GGUF file to its eos ids
    ends = {} if is_gguf(folder) else folder_turn_ends(folder)
    added_ends = {token: id_ for token, id_ in ends.items() if id_ not in eos}
    tied = keys.get("tie_word_embeddings", bool, False)
    if tied and not is_gguf(folder) and has_own_head(folder, family.text_tensors):
        tied = False
        warn(
            f"{keys.where}: tie_word_embeddings is true, but the values of lm_head.weight are not the embedding's; "
            "the file's head is used",
            stacklevel=1,
        )
    fields: dict[str, Any] = {
        "vocab_size": keys.get("vocab_size", int),
        "num_layers": keys.get("num_hidden_layers", int),
        "width": width,
        "mlp_width": keys.get("intermediate_size", int),
        "num_heads": heads,
        "num_kv_heads": keys.get("num_key_value_heads", int, heads),
        "head_dim": keys.get("head_dim", int, width // max(heads, 1)),
        "norm_eps": keys.get("rms_norm_eps", float, 1e-6),
        "rope": family.rope(keys, max_length),
        "activation": keys.get("hidden_act", str, "silu"),
        "tied": tied,
        "model_type": model_type,
        "max_position": _trained_context(keys),
        "bos_id": keys.get("bos_token_id", int, None),
        "eos_ids": tuple(sorted({*eos, *added_ends.values()})),
        "turn_ends": tuple(added_ends.items()),
    } | family.fields(keys)
    if method == "fp8":
        fields |= fp8.fields(quantisation)
    try:
        config = ModelConfig(**fields)
    except UserError as error:
        raise keys.error(str(error)) from None
    if (file := keys.get("transformers_weights", str, None)) not in (None, "model.safetensors"):
        raise keys.error(f"transformers_weights names {shown(file)}, expected model.safetensors")
    window, layers = _windows(keys, family, config)
    try:
        config = dataclasses.replace(config, sliding_window=window, sliding_layers=layers)
    except UserError as error:
        raise keys.error(str(error)) from None
    return dataclasses.replace(config.with_weights(weights), kv_cache_dtype=kv_cache_dtype)


def warn_of_turn_ends(config: ModelConfig) -> None:
    """Warn about tokens that end an answer only because the chat template ends a turn with them."""
    if not config.turn_ends:
        return
    added = {id_ for _, id_ in config.turn_ends}
    tokens = ", ".join(f"{shown(token)} ({id_})" for token, id_ in config.turn_ends)
    named = ", ".join(str(id_) for id_ in config.eos_ids if id_ not in added)
    warn(
        f"{config.name}: answers also end at {tokens}, with which the chat template ends a turn; the model's files "
        f"name {named[:100] or 'no token'}",
        stacklevel=4,
    )


def config_json(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Return the `config.json` of a model with weights in `dtype`, in a form that transformers 4 and 5 read.

    A "dynamic" rope is written in Hugging Face's form, without the length that kvjax fixes it at.

    Raises:
        UserError: the `model_type` does not support one of the flags, so transformers would run another model.
    """
    if config.model_type not in FAMILIES:
        raise UserError(
            f"model_type {config.model_type!r} has no Hugging Face class, only {', '.join(FAMILIES)}"
        )
    family = FAMILIES[config.model_type]
    keys = {
        "architectures": [family.architecture],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.activation,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": rope_scaling(config.rope),
        "tie_word_embeddings": config.tied,
        "bos_token_id": config.bos_id,
        "eos_token_id": config.eos_ids[0] if len(config.eos_ids) == 1 else list(config.eos_ids) or None,
        "torch_dtype": dtype,
    } | family.keys(config)
    if config.weights is not None:
        raise UserError(
            f"models with {config.weights} weights are read, but not written: write the model they were made from"
        )
    written = JsonObject({**family.defaults, **keys}, "config.json")
    window, layers = _windows(written, family, config)
    expected = FAMILY_FIELDS | {"sliding_window": window, "sliding_layers": layers} | family.fields(written)
    wrong = [
        f"{name}={getattr(config, name)}"
        for name, value in expected.items()
        if getattr(config, name) != value
    ]
    if family.rope(written, None).share != config.rope.share:
        wrong.append(f"partial_rotary_factor={config.rope.share:g}")
    if wrong:
        raise UserError(f"a {config.model_type} model cannot have {', '.join(wrong)}")
    return keys


def _trained_context(keys: JsonObject) -> int:
    """Return the declared context length, or the length of one chunk with dual chunk attention, since full attention
    reaches no further."""
    declared, name = keys.get("max_position_embeddings", int), "dual_chunk_attention_config"
    chunks = JsonObject(keys.get(name, dict, {}), f"{keys.where}: {name}")
    return min(declared, chunks.get("original_max_position_embeddings", int, declared))


def _windows(keys: JsonObject, family: Family, config: ModelConfig) -> tuple[int, tuple[int, ...]]:
    """Return the sliding window and the layers that have it, as transformers reads the same keys. It is (0, ()) if
    every layer sees the whole context."""
    window, layers = family.windows(keys)
    kinds = [str(kind) for kind in keys.get("layer_types", list, [])]
    is_limiting = (keys.get("sliding_window", int, None) or 0) < config.longest
    supported = {FULL} if is_limiting and not layers else {FULL, SLIDING}
    if others := sorted(set(kinds) - supported):
        raise keys.error(
            f"layer_types has {', '.join(others[:3])[:200]}; only {' and '.join(sorted(supported))} is supported"
        )
    if kinds and len(kinds) < config.num_layers:
        raise keys.error(f"layer_types names {len(kinds)} layers, expected {config.num_layers}")
    layers = tuple(layer for layer in layers if layer < config.num_layers)
    window = config.longest if window is None else min(window, config.longest)
    if config.sliding_rope is None:
        layers = layers if window < config.longest else ()
    return (window, layers) if layers else (0, ())
