"""Gates in two formats: the folder of `kvjax.checkpoints.folder`, weights and a description, and the file of torch.save
that Fast KVzip's authors publish."""

import functools
import re
from pathlib import Path
from typing import Any, NamedTuple

from flax import nnx

from kvjax.builtin import BUILTIN
from kvjax.checkpoints.folder import read_sizes, readable_as, save_exported
from kvjax.checkpoints.gates import OpenGates, open_gates
from kvjax.checkpoints.module import arrays_of, filled
from kvjax.checkpoints.torch_file import TorchFile, shape_of
from kvjax.errors import UserError
from kvjax.policies.eviction.fast_kvzip.gate import FORMS, INPUTS, SinkGate

METHOD = "fast_kvzip"
"""The method's name in config.json."""
PACKAGED = f"{BUILTIN}:{METHOD}"
"""The built-in model's gates."""


class Sizes(NamedTuple):
    """The sizes and forms of gates."""

    layers: int
    kv_heads: int
    """The number of kv heads in each layer."""
    group: int
    """The number of query heads of each kv head."""
    width: int
    """The width of the gates' input."""
    dim: int
    """D', the width of a gate's queries and keys."""
    sinks: int
    """S, the number of sink keys of each kv head."""
    form: str
    """One of `FORMS`."""
    inputs: str
    """The gates' input, one of `INPUTS`."""

    @classmethod
    def of(cls, gates: SinkGate, inputs: str = "hidden") -> "Sizes":
        """Return the sizes of gates that look at `inputs`."""
        return cls(*gates.shape, gates.dim, gates.sinks, gates.form, inputs)

    def make(self, seed: int = 0) -> SinkGate:
        """Return new gates of these sizes."""
        return SinkGate(*self[:4], dim=self.dim, sinks=self.sinks, form=self.form, rngs=nnx.Rngs(seed))


def save_gates(folder: str | Path, gates: SinkGate, description: dict[str, Any]) -> None:
    """Write gates to a folder. `description` holds `inputs`, the gates' input if that is not `hidden`, and anything
    else about how the gates were made."""
    sizes = Sizes.of(gates, description.get("inputs", "hidden"))
    save_exported(folder, arrays_of(gates), {"method": METHOD} | sizes._asdict() | description)


def gate_sizes(path: str | Path) -> Sizes:
    """Return the sizes of the gates in a folder or a file without reading the weights. Raises UserError as `load_gates`
    does."""
    with open_gates(_named(path), _described, _published) as (found, _):
        return found.sizes


def load_gates(path: str | Path) -> tuple[SinkGate, dict[str, Any]]:
    """Return gates and their description. `path` is a folder that `save_gates` wrote, or a file that the authors' code
    wrote, which is read without torch. `builtin` stands for the built-in model's gates.

    Raises UserError naming the faulty file.
    """
    with open_gates(_named(path), _described, _published) as (found, file):
        return filled(found.sizes.make, found.arrays(), file), found.description


def check_made_for(sizes: Sizes, model: Any) -> None:
    """Raise UserError if the gates are for another configuration."""
    width = model.width if sizes.inputs == "hidden" else model.head_dim
    expected = model.num_full_layers, model.num_kv_heads, model.num_heads // model.num_kv_heads, width
    if sizes[:4] != expected:
        raise UserError(
            f"fast_kvzip: these gates are for (layers, kv heads, query heads of each, width) = {sizes[:4]}, the "
            f"model has {expected}"
        )


def _named(path: str | Path) -> str | Path:
    """Return the path; for `builtin`, the name of the built-in model's gates."""
    return PACKAGED if str(path) == BUILTIN else path


def _described(folder: str | Path, description: dict[str, Any]) -> Sizes:
    if (method := description.get("method", METHOD)) != METHOD:
        raise UserError(f"{folder}: these are gates of {method}, not of Fast KVzip")
    with readable_as("Fast KVzip gates", folder):
        sizes = Sizes(**read_sizes(description, Sizes.__annotations__))
        if sizes.form not in FORMS or sizes.inputs not in INPUTS:
            raise ValueError(f"{sizes}")
    return sizes


def _arrays(opened: TorchFile, sizes: Sizes, layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the arrays of an authors' file under our names."""
    w_q, bias_q, w_k, norm_q, norm_k, k_base, b = opened.stack(layers, _shapes(sizes)).values()
    count, k, g, d, c = sizes[:5]
    return {
        "w_q": w_q.reshape(count, k, g, c, d),
        "bias_q": bias_q.reshape(count, k, g, c),
        "w_k": w_k.reshape(count, k, c, d),
        "norm_q": norm_q,
        "norm_k": norm_k,
        "k_base": k_base[:, :, 0],
        "b": b[:, :, 0],
    }


def _published(opened: TorchFile) -> OpenGates[Sizes]:
    """Return the gates in an authors' file. Its first layer determines the sizes, which the file's name and all layers
    must have."""
    layers = opened.content.get("module") if isinstance(opened.content, dict) else None
    if not isinstance(layers, list) or not layers or not all(isinstance(layer, dict) for layer in layers):
        raise UserError(
            f"{opened.file}: these are no Fast KVzip gates: expected a list of layers under `module`"
        )
    match [shape_of(layers[0], name) for name in ("q_proj.weight", "k_base", "b")]:
        case [(_, int(d)), (int(k), 1, int(sinks), int(c)), (_, 1, int(g))] if min(d, k, sinks, c, g) > 0:
            sizes = Sizes(len(layers), k, g, d, c, sinks, "sink", "hidden")
        case [*shapes]:
            names = "q_proj.weight, k_base and b, of 2, 4 and 3 axes"
            raise UserError(f"{opened.file}: these are no Fast KVzip gates: expected {names}, found {shapes}")
    for word, size in (("q", g), ("dim", c), ("sink", sinks)):
        match = re.search(rf"(?:^|_){word}(\d+)(?:_|$)", opened.file.stem)
        if match and int(match[1]) != size:
            raise UserError(f"{opened.file}: its name says {word}{match[1]}, its arrays are of {word}{size}")
    opened.check(layers, _shapes(sizes))
    description = {"method": METHOD} | sizes._asdict()
    return OpenGates(sizes, description, functools.partial(_arrays, opened, sizes, layers))


def _shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's arrays in the authors' files: linear maps [out, in]. Their outputs are ordered by
    kv head and, for queries, by query head."""
    _, k, g, d, c, sinks, *_ = sizes
    return {
        "q_proj.weight": (k * g * c, d),
        "q_proj.bias": (k * g * c,),
        "k_proj.weight": (k * c, d),
        "q_norm.weight": (c,),
        "k_norm.weight": (c,),
        "k_base": (k, 1, sinks, c),
        "b": (k, 1, g),
    }
