"""LoRA adapters as peft saves them (a folder with `adapter_config.json`), merged into the base model on loading."""

import dataclasses
import math
import re
from pathlib import Path

import numpy as np

from kvjax.errors import UserError, shown
from kvjax.models.json_file import JsonObject
from kvjax.models.kinds import few
from kvjax.models.names import canonical
from kvjax.models.tensor_files import ADAPTER, DTYPES, INDEX, SINGLE, TensorInFile, tensors_of

WEIGHTS = "adapter_model.safetensors"
# fmt: off
_WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules", "inference_mode",
    "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout",
    "megatron_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "runtime_config",
    "target_modules", "task_type", "use_rslora",
}
# fmt: on
"""Keys that do not change the merged weights, or that `_settings` checks."""
_SUPPORTED_INITS = None, True, False, "gaussian", "eva", "orthogonal"
"""Values of `init_lora_weights` that leave the base model as it is."""


@dataclasses.dataclass(frozen=True)
class MergedTensor(TensorInFile):
    """A weight of the base model plus scale · up · down, in float32."""

    base: TensorInFile
    """The weight, [outputs, inputs]."""
    down: TensorInFile
    """peft's lora_A, [rank, inputs]."""
    up: TensorInFile
    """peft's lora_B, [outputs, rank]."""
    scale: float
    """The factor of the product."""

    def fill(self, out: np.ndarray, start: int) -> None:
        """Fill `out` as `TensorInFile.fill` does."""
        stop = min(start + out.shape[0], self.shape[0])
        if start < stop:
            weight, up = (x.read(start, stop).astype(np.float32) for x in (self.base, self.up))
            out[: stop - start] = weight + self.scale * (up @ self.down.read().astype(np.float32))


def is_adapter(folder: Path) -> bool:
    """Return True for a folder with an adapter and without a model's weights."""
    weights = any((folder / name).exists() for name in (SINGLE, INDEX))
    return (folder / ADAPTER).is_file() and not weights


def base_path(folder: Path) -> Path:
    """Return the folder or file of an adapter's base model; any other path is returned unchanged.

    Raises:
        UserError: the adapter is not a plain LoRA adapter, or its base model is not found or is an adapter too.
    """
    if not is_adapter(folder):
        return folder
    from kvjax.models.folder import find_model

    keys, base, _ = _settings(folder)
    try:
        path = find_model(base)
    except UserError as error:
        raise keys.error(f"the base model of this adapter is not found: {error}") from None
    if is_adapter(path):
        raise _refused(keys, "an adapter of another adapter")
    return path


def merge(folder: Path, stored: dict[str, TensorInFile]) -> dict[str, TensorInFile]:
    """Return the base model's tensors, with the adapter merged into those that it changes.

    Raises:
        UserError: the adapter's tensors are not LoRA matrices of these weights.
    """
    keys, _, scale = _settings(folder)
    file, rank = folder / WEIGHTS, keys.get("r", int)
    if not file.exists():
        raise UserError(f"{folder}: an adapter without weights, expected {WEIGHTS}")
    pairs: dict[str, dict[str, TensorInFile]] = {}
    for tensor in tensors_of(file):
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", tensor.name)
        # only the text model of a multimodal model is loaded
        name = canonical(f"{match[1]}.weight".replace("language_model.", "", 1)) if match else ""
        base = stored.get(name)
        is_matrix = base is not None and len(base.shape) == 2 and {base.kind, tensor.kind} <= DTYPES.keys()
        if match is None or base is None or not is_matrix:
            raise UserError(
                f"{file}: {few([tensor.name])} is not a LoRA matrix of one of the base model's weights"
            )
        expected = (rank, base.shape[1]) if match[2] == "A" else (base.shape[0], rank)
        if tensor.shape != expected:
            raise UserError(f"{file}: {few([tensor.name])} has shape {tensor.shape}, expected {expected}")
        pairs.setdefault(name, {})[match[2]] = tensor
    if incomplete := [name for name, pair in pairs.items() if len(pair) < 2]:
        raise UserError(f"{file}: has only one of the two matrices of {few(incomplete)}")
    if not pairs:
        raise UserError(f"{file}: has no tensors, expected LoRA matrices")
    merged = {}
    for name, pair in pairs.items():
        base = stored[name]
        merged[name] = MergedTensor(
            base.name, base.file, base.shape, "F32", base, pair["A"], pair["B"], scale
        )
    return stored | merged


def _settings(folder: Path) -> tuple[JsonObject, str, float]:
    """Return the adapter's configuration, its base model's name and the factor of its matrices' product."""
    keys = JsonObject.read(folder / ADAPTER)
    kind = keys.get("peft_type", str)
    if kind != "LORA":
        raise _refused(keys, f"a {shown(kind)} adapter (only LORA is supported)")
    for name, value in keys.data.items():
        default = (name, value) in (("bias", "none"), ("revision", "main"))
        if value and name not in _WITHOUT_EFFECT and not default:
            raise _refused(keys, f"a LoRA adapter with {name[:40]} = {shown(value)}")
    if (init := keys.data.get("init_lora_weights")) not in _SUPPORTED_INITS:
        raise _refused(keys, f"a LoRA adapter with init_lora_weights = {shown(init)}")
    rank, alpha = keys.get("r", int), keys.get("lora_alpha", float)
    if rank < 1 or not math.isfinite(alpha):
        raise keys.error(f"r must be at least 1 and lora_alpha finite, got {rank} and {alpha}")
    divisor = math.sqrt(rank) if keys.get("use_rslora", bool, False) else rank
    return keys, keys.get("base_model_name_or_path", str), alpha / divisor


def _refused(keys: JsonObject, adapter: str) -> UserError:
    base = few([str(keys.data.get("base_model_name_or_path"))])
    return keys.error(f"{adapter}: merge it onto its base model, {base}, first (peft's merge_and_unload)")
