"""Llama, Qwen, Mistral, Phi and SmolLM3 decoders, their Hugging Face folders and GGUF files.

config, families, rope, decoder: a model. folder: the place of its files. loading, names, tensor_files, adapter,
gguf_file: its weights. kinds: folders and files that hold no model. json_file, rope_json, gguf_config, turn_ends: its
configuration. tokenizer_files, gguf_tokenizer: a tokenizer. quiet: transformers' import. chat: text as tokens. saving:
models to folders.
"""

from kvjax.models.config import ModelConfig, read_config
from kvjax.models.decoder import Decoder, DecoderLayer, scan_layers
from kvjax.models.folder import load_tokenizer
from kvjax.models.loading import load, load_model
from kvjax.models.saving import save_model

__all__ = [
    "Decoder",
    "DecoderLayer",
    "ModelConfig",
    "load",
    "load_model",
    "load_tokenizer",
    "read_config",
    "save_model",
    "scan_layers",
]
