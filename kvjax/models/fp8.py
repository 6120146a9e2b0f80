"""Folders whose matrices are 8-bit floats (e4m3) with a scale for each block, as in DeepSeek-V3 (arXiv:2412.19437,
section 3.3) and Qwen3-8B-FP8. The numbers in `weight` are multiplied by `weight_scale_inv`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvjax.errors import UserError, shown
from kvjax.models.json_file import JsonObject
from kvjax.models.names import SCALES
from kvjax.models.tensor_files import TensorInFile

WEIGHT_BLOCK = 128
"""The number of inputs and of outputs that share a scale."""


def fields(keys: JsonObject) -> dict[str, Any]:
    """Return the fields of `ModelConfig` that the `quantization_config` of a `config.json` sets."""
    block, kind = keys.get("weight_block_size", list, []), keys.get("fmt", str, "e4m3")
    if block != [WEIGHT_BLOCK, WEIGHT_BLOCK] or kind != "e4m3":
        raise keys.error(
            f"FP8 weights must be e4m3 in blocks of {WEIGHT_BLOCK} × {WEIGHT_BLOCK}, got {shown(kind)} and "
            f"weight_block_size {shown(block)}"
        )
    return {"weights": "fp8", "weight_block": WEIGHT_BLOCK}


@dataclasses.dataclass(frozen=True)
class ScalesByRow(TensorInFile):
    """The scales of a matrix as [outputs, blocks of inputs], with each row repeated for all outputs of its block."""

    blocks: TensorInFile
    """The scales as they are stored, [blocks of outputs, blocks of inputs]."""

    def fill(self, out: np.ndarray, start: int) -> None:
        """Fill `out` as `TensorInFile.fill` does."""
        stop = min(start + out.shape[0], self.shape[0])
        if start < stop:
            first = start // WEIGHT_BLOCK
            blocks = self.blocks.read(first, (stop - 1) // WEIGHT_BLOCK + 1)
            out[: stop - start] = blocks[np.arange(start, stop) // WEIGHT_BLOCK - first]


def with_scales_by_row(stored: Mapping[str, TensorInFile]) -> dict[str, TensorInFile]:
    """Return a folder's tensors with the scales of each matrix repeated for all its rows.

    Raises:
        UserError: scales do not have the shape that their matrix needs.
    """
    tensors = dict(stored)
    for name, scales in stored.items():
        matrix = stored.get(name.removesuffix(SCALES))
        if not name.endswith(SCALES) or matrix is None:
            continue
        expected = tuple(-(-size // WEIGHT_BLOCK) for size in matrix.shape)
        if scales.shape != expected or len(expected) != 2:
            raise UserError(f"{scales.file}: {scales.name} is {scales.shape}, expected {expected}")
        shape = matrix.shape[0], scales.shape[1]
        tensors[name] = ScalesByRow(scales.name, scales.file, shape, scales.kind, scales)
    return tensors
