"""Experts of a layer that a file holds in one tensor, plain or in MXFP4 (OCP Microscaling Formats 1.0). MXFP4 has
blocks of 32 numbers of 4 bits, two per byte, and a power of two as the scale of each block."""

import dataclasses

import numpy as np

from kvjax.errors import UserError
from kvjax.models.tensor_files import DTYPES, TensorInFile

NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The number of each of the 16 patterns of 4 bits."""


def decode(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the numbers [..., blocks · 32], given blocks [..., blocks, 16] of uint8 and their exponents [..., blocks].
    The lower half of a byte comes first."""
    pairs = np.stack([NUMBERS[blocks & 15], NUMBERS[blocks >> 4]], -1)
    numbers = pairs.reshape(*blocks.shape[:-1], -1)
    numbers = np.ldexp(numbers, scales[..., None].astype(np.int32) - 127)
    return numbers.reshape(*scales.shape[:-1], -1)


@dataclasses.dataclass(frozen=True)
class ExpertOfTensor(TensorInFile):
    """The matrix [outputs, inputs] or the bias [outputs, 1] of one expert."""

    layer: TensorInFile
    """The tensor with all experts of the layer: matrices [experts, inputs, outputs], MXFP4 matrices [experts, outputs,
    blocks, 16], or biases [experts, outputs]."""
    scales: TensorInFile | None
    """The exponents of MXFP4 blocks; None if the tensor is plain."""
    expert: int
    """The index of the expert."""
    first: int
    """The index of its first output."""
    step: int
    """The distance from one of its outputs to the next."""

    @classmethod
    def of(
        cls, layer: TensorInFile, scales: TensorInFile | None, expert: int, first: int, step: int
    ) -> "ExpertOfTensor":
        """Return one expert of a tensor. Raises UserError if its shape is not MXFP4 though it has scales."""
        shape = layer.shape
        if scales is not None:
            if (
                len(shape) != 4
                or shape[3] != 16
                or scales.shape != shape[:3]
                or {layer.kind, scales.kind} != {"U8"}
            ):
                raise UserError(f"{layer.file}: {layer.name} of shape {shape} is not MXFP4")
            outputs, inputs, kind = shape[1], 32 * shape[2], "BF16"
        else:
            outputs, inputs, kind = shape[-1], shape[1] if len(shape) == 3 else 1, layer.kind
        expert_shape = (outputs // step, inputs)
        return cls(layer.name, layer.file, expert_shape, kind, layer, scales, expert, first, step)

    def fill(self, out: np.ndarray, start: int) -> None:
        """Fill `out` as `TensorInFile.fill` does. The whole expert is read."""
        x = _at_index(self.layer, self.expert)
        if self.scales is not None:
            x = decode(x, _at_index(self.scales, self.expert))
        else:
            x = x.T if x.ndim == 2 else x[:, None]
        rows = x[self.first :: self.step][start : start + out.shape[0]]
        out[: len(rows)] = rows


def _at_index(tensor: TensorInFile, index: int) -> np.ndarray:
    """Return the values of a tensor at an index of its first axis."""
    out = np.empty((1, *tensor.shape[1:]), np.uint8 if tensor.kind == "U8" else DTYPES[tensor.kind])
    tensor.fill(out, index)
    return out[0]
