"""Kinds of folders and files that kvjax cannot read as models, so that an error can name them."""

import re
from collections.abc import Iterable
from pathlib import Path

_FOLDERS = {
    "orbax": "an Orbax export of kvjax: python -m kvjax.convert writes it as a Hugging Face folder",
    "_CHECKPOINT_METADATA": "an Orbax checkpoint",
    "_METADATA": "an Orbax checkpoint",
    "manifest.ocdbt": "an Orbax checkpoint",
    "items": "an Orbax checkpoint",
    "*/items": "a folder of Orbax checkpoints",
    "consolidated*": "Meta's or Mistral's own layout (consolidated weights)",
    "params.json": "Meta's or Mistral's own layout (params.json)",
    "gates.safetensors": "gates, which belong to --gates",
    "adapter_model.*": "a PEFT adapter without its adapter_config.json",
    "model-*-of-*.safetensors": "shards without model.safetensors.index.json, which says what is in them",
    "*.safetensors": "safetensors of other names",
    "*.bin": "only safetensors are read from a folder",
    "*.pth": "only safetensors are read from a folder",
    "*.pt": "only safetensors are read from a folder",
    "*.gguf": "GGUF files: pass one of them instead of the folder",
    "*.msgpack": "only safetensors are read from a folder",
    "*.h5": "only safetensors are read from a folder",
    "*.onnx": "only safetensors are read from a folder",
    "*/config.json": "a folder of model folders: pass one of them",
    "*/adapter_config.json": "a folder of adapters: pass one of them",
    "snapshots/*/config.json": "a folder of the hub's cache: pass one of its snapshots",
}
"""Kinds of folders by the pattern of a name in them. The first match counts."""
_ORBAX = "; kvjax reads only those that python -m kvjax.convert --to orbax wrote, by the folder that holds config.json"
_FILES = {
    rb"version https://git-lfs": "a Git LFS pointer, not the weights: git lfs pull fetches them",
    rb"\s*<": "a web page, not the weights: download the file again",
    rb"PK\x03\x04|\x80\x02": "a PyTorch file, expected safetensors",
    rb"GGUF": "a GGUF file: give it the suffix .gguf and pass it instead of the folder",
}
"""Kinds of files by a pattern of their first bytes."""
_TENSORS = {
    r"\.g_idx$": "GPTQ-quantized weights",
    r"\.(qweight|qzeros)$": "AWQ- or GPTQ-quantized weights",
    r"\.(absmax|quant_map|SCB|quant_state\.\w+)$": "bitsandbytes-quantized weights",
    r"\.weight_packed$": "quantized weights of compressed-tensors",
    r"\.(weight_scale|weight_scale_inv|input_scale|activation_scale|[kv]_scale)$": "FP8- or INT8-quantized weights",
    r"\.(scales|biases)$": "MLX-quantized weights",
    r" is F(4$|[68]_)": "FP8-quantized weights",
    r"proj\.weight is U8$": "quantized weights, several packed into a byte (as bitsandbytes does)",
    r"\blora_|\.base_layer\.": "an adapter or a model with one that is not merged",
    r"(^|\.)(language_model|text_model|vision_model|vision_tower|visual|multi_modal_projector)\.": "a multimodal model",
    r"\.(experts|block_sparse_moe)\.": "a mixture of experts",
    r"^(model\.)?(score|classifier|v_head|reward_head|qa_outputs)\.": "a classifier or reward model",
    r"(^|\.)(tok_embeddings|attention\.w[qkvo])\.": "weights in Meta's or Mistral's own layout",
    r"(^|\.)encoder\.": "an encoder",
    r"^(transformer|gpt_neox|backbone|base_model|_orig_mod|module)\.": "weights by another program's names",
}
"""Kinds of weights by the pattern of a tensor that kvjax does not read. The first match counts."""


def kind_of_folder(folder: Path) -> str:
    """Return the kind of a folder without weights, in parentheses after a space; empty if it is unknown."""
    if any((folder / name).exists() for name in ("model.safetensors", "model.safetensors.index.json")):
        return ""
    for pattern, kind in _FOLDERS.items():
        if names := sorted(str(path.relative_to(folder)) for path in folder.glob(pattern)):
            advice = _ORBAX if "Orbax checkpoint" in kind else ""
            return f" ({few(names)}: {kind}{advice})"
    return ""


def kind_of_file(file: Path) -> str | None:
    """Return the kind of a file that is not in the safetensors format; None if it is unknown."""
    try:
        with file.open("rb") as opened:
            first_bytes = opened.read(64)
    except OSError:
        return None
    return next((kind for pattern, kind in _FILES.items() if re.match(pattern, first_bytes)), None)


def kind_of_tensors(names: Iterable[str]) -> str | None:
    """Return the kind of weights that have these unreadable tensors; None if it is unknown."""
    names = list(names)
    for pattern, kind in _TENSORS.items():
        if match := next((name for name in names if re.search(pattern, name)), None):
            return f"{kind} ({few([match])})"
    return None


def few(names: Iterable[str], most: int = 3) -> str:
    """Return the first names in one line, each shortened if it is long, and how many more there are."""
    names = list(names)
    shortened = [name if len(name) <= 90 else f"{name[:80]}…" for name in names[:most]]
    return ", ".join(shortened) + (f" and {len(names) - most:,} more" if len(names) > most else "")
