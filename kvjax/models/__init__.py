"""Decoders of the Llama, Qwen, Mistral, Phi, SmolLM3, Gemma 3 and gpt-oss families, read from and written to files.

decoder, layers, periods, layout, matrix, experts, rope: the model. config, families, shapes, json_file, rope_json,
gguf_config, turn_ends: its configuration. folder, adapter: where its files are. loading, names, tensor_files,
gguf_file, fp8, mxfp4: its weights. saving: writing of Hugging Face folders. tokenizer_files, gguf_tokenizer, quiet: its
tokenizer.
chat: prompts as tokens. kinds: error messages for files that hold no model.
"""

from kvjax.models.config import ModelConfig, read_config
from kvjax.models.decoder import Decoder, scan_layers
from kvjax.models.folder import load_tokenizer
from kvjax.models.loading import load, load_model
from kvjax.models.saving import save_model

__all__ = [
    "Decoder",
    "ModelConfig",
    "load",
    "load_model",
    "load_tokenizer",
    "read_config",
    "save_model",
    "scan_layers",
]
