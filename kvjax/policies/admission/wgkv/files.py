"""Write gates in two formats: the folder of `kvjax.checkpoints.folder`, weights and a description, and the file of
torch.save that WG-KV's authors publish."""

import functools
import re
from pathlib import Path
from typing import Any, NamedTuple

from flax import nnx

from kvjax.checkpoints.folder import read_sizes, readable_as, save_exported
from kvjax.checkpoints.gates import OpenGates, open_gates
from kvjax.checkpoints.module import arrays_of, filled
from kvjax.checkpoints.torch_file import TorchFile, shape_of
from kvjax.errors import UserError
from kvjax.policies.admission.wgkv.gate import WriteGate

PUBLISHED = {"tau": 0.1, "window": 256}
"""The values with which the authors' gates were trained and are used. Their files do not contain them."""
PREFIX = re.compile(r"model\.layers\.(\d{1,4})\.self_attn\.g_predictors\.(.+)")
"""The pattern of names in the authors' files: the layer, and an array of its gates."""


def usual_expand(model: Any) -> float:
    """Return the hidden width of a model's gates over head_dim in WG-KV's code: 1.5 for Qwen3, else 4."""
    return 1.5 if model.model_type == "qwen3" else 4.0


class Sizes(NamedTuple):
    """The sizes of write gates."""

    layers: int
    kv_heads: int
    """The number of kv heads in each layer."""
    head_dim: int
    """The width of keys."""
    expand: float
    """The hidden width divided by `head_dim`."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Layers, kv heads, head_dim and the gates' hidden width."""
        return *self[:3], round(self.head_dim * self.expand)

    def make(self, seed: int = 0) -> WriteGate:
        """Return new gates of these sizes."""
        return WriteGate(*self[:3], expand=self.expand, rngs=nnx.Rngs(seed))


def save_gates(folder: str | Path, gates: WriteGate, description: dict[str, Any]) -> None:
    """Write gates to a folder. `description` holds tau, window, rate and peak_rate (the mean and the largest share of a
    sequence's tokens that were admitted, layers × kv heads), and anything else about how the gates were made."""
    arrays = arrays_of(gates)
    layers, kv_heads, fan_in, width = arrays["w1"].shape
    shape = Sizes(layers, kv_heads, fan_in // 2, width / (fan_in // 2))
    save_exported(folder, arrays, {"method": "wgkv"} | shape._asdict() | description)


def gate_sizes(path: str | Path) -> Sizes:
    """Return the sizes of the gates in a folder or a file without reading the weights. Raises UserError as `load_gates`
    does."""
    with open_gates(path, _described, _published) as (found, _):
        return found.sizes


def load_gates(path: str | Path, model: Any = None) -> tuple[WriteGate, dict[str, Any]]:
    """Return gates and their description. `path` is a folder that `save_gates` wrote, `builtin` for the gates that come
    with kvjax, or a file that the authors' code wrote. Such a file is read without torch, and `PUBLISHED` describes it.

    Raises UserError naming the faulty file, or if the gates are not for `model`.
    """
    with open_gates(path, _described, _published) as (found, file):
        check_made_for(found.sizes[:3], getattr(model, "config", None))
        return filled(found.sizes.make, found.arrays(), file), found.description


def check_made_for(shape: tuple[int, int, int], model: Any) -> None:
    """Raise UserError if there is a `model` and the gates are for another configuration."""
    if model is not None:
        expected = (model.num_full_layers, model.num_kv_heads, model.head_dim)
        if shape != expected:
            raise UserError(
                f"wgkv: these gates are for (layers, kv heads, head_dim) = {shape}, the model has {expected}"
            )


def _described(folder: str | Path, description: dict[str, Any]) -> Sizes:
    with readable_as("WG-KV gates", folder):
        sizes = Sizes(**read_sizes(description, Sizes.__annotations__))
        if min(sizes.shape) < 1:
            raise ValueError(f"{sizes}")
    return sizes


def _arrays(opened: TorchFile, sizes: Sizes, layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the arrays of an authors' file under our names."""
    norm_pre, norm_post, w1, b1, w2, b2 = opened.stack(layers, _shapes(sizes)).values()
    heads, width = w2.shape[:2], w2.shape[2]
    return {
        "norm_pre": norm_pre,
        "norm_post": norm_post,
        "w1": w1.reshape(*heads, width, -1).swapaxes(2, 3),
        "b1": b1.reshape(*heads, width),
        "w2": w2.reshape(*heads, width),
        "b2": b2,
    }


def _published(opened: TorchFile) -> OpenGates[Sizes]:
    """Return the gates in an authors' file. Its first layer determines the sizes, which all layers must have."""
    sizes, layers = _layers(opened)
    opened.check(layers, _shapes(sizes))
    description = {"method": "wgkv"} | sizes._asdict() | PUBLISHED
    return OpenGates(sizes, description, functools.partial(_arrays, opened, sizes, layers))


def _layers(opened: TorchFile) -> tuple[Sizes, list[dict[str, Any]]]:
    """Return the sizes that the first layer has, and the arrays of each layer by name."""
    layers = opened.layers(PREFIX, "WG-KV gates")
    shapes = [shape_of(layers[0], name) for name in ("pre_key_norm.weight", "conv2.weight")] if layers else []
    match shapes:
        case [(int(head_dim),), (int(kv_heads), int(width), 1)] if min(head_dim, kv_heads, width) > 0:
            return Sizes(len(layers), kv_heads, head_dim, width / head_dim), layers
    raise UserError(
        f"{opened.file}: these are no WG-KV gates: layer 0 has no pre_key_norm and conv2 of any size"
    )


def _shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's arrays in the authors' files: two convolutions with the kv heads as groups. The
    outputs of the first are ordered head by head."""
    _, k, h, m = sizes.shape
    return {
        "pre_key_norm.weight": (h,),
        "post_key_norm.weight": (h,),
        "conv1.weight": (k * m, 2 * h, 1),
        "conv1.bias": (k * m,),
        "conv2.weight": (k, m, 1),
        "conv2.bias": (k,),
    }
