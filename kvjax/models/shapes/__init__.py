"""Shapes of models, without weights: well-known ones from a `config.json` in a folder here, others from their own. Also
checks of meshes and lengths against a shape."""

import dataclasses
from pathlib import Path

from kvjax.builtin import BUILTIN
from kvjax.cli.launch import MeshShape
from kvjax.errors import UserError, warn
from kvjax.models import decoder
from kvjax.models.adapter import base_of
from kvjax.models.config import ModelConfig, read_config
from kvjax.models.folder import find_model
from kvjax.models.gguf_file import is_gguf
from kvjax.models.json_file import JsonObject

HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """The properties of a model that compiling needs."""

    config: ModelConfig
    """Sizes and flags."""
    dtype: str
    """The dtype of the weights as `config.json` states it; float32 where it does not."""


def known() -> list[str]:
    """Return the names of the shapes that need no folder."""
    return sorted(path.parent.name for path in HERE.glob("*/config.json"))


def find_shape(
    name: str, max_length: int | None = None, weights: str | None = None, kv_cache_dtype: str | None = None
) -> ModelShape:
    """Return the shape of a model by name (`llama-3.1-8b`, or a hub id that begins so), of a folder with a
    `config.json`, of a GGUF file, or of `builtin`. Nothing is fetched.

    Args:
        max_length: the longest sequence, as for `read_config`.
        weights: the 8-bit dtype of the layers' matrices, as for `read_config`.
        kv_cache_dtype: the 8-bit dtype of entries, as for `read_config`.

    Raises:
        UserError: there is none of that name.
    """
    path = Path(name).expanduser()
    if name == BUILTIN or path.exists():
        found = base_of(find_model(name))
    else:
        stem = name.rpartition("/")[2].lower()
        named = [own for own in known() if stem == own or stem.startswith(own + "-")]
        if not named:
            raise UserError(
                f"--model {name}: no such folder here, and of no known shape: {', '.join(known())}; a folder needs no "
                "more than config.json"
            )
        found = HERE / max(named, key=len)
    config = read_config(found, max_length, weights, kv_cache_dtype)
    if is_gguf(found):
        return ModelShape(config, "float32")
    keys = JsonObject.read(found / "config.json")
    stated = keys.get("torch_dtype", str, None) or keys.get("dtype", str, "float32")
    return ModelShape(config, stated)


def check_longest(config: ModelConfig, tokens: int, said: str = "") -> None:
    """Warn of sequences that are longer than the model is for. `said`: the beginning of the warning, in place of the
    number of tokens."""
    if tokens > config.longest:
        more = said or f"{tokens:,} tokens are more"
        warn(f"{more} than the {config.longest:,} that the model declares or was trained for", stacklevel=2)


def fit_mesh(mesh: MeshShape, config: ModelConfig) -> MeshShape:
    """Return a mesh as it is used for a model (`MeshShape.for_heads`), before there are devices. Raises UserError if it
    does not divide the model."""
    fitted = mesh.for_heads(config.num_kv_heads)
    try:
        decoder.check_mesh(config, dataclasses.asdict(fitted))
    except UserError as error:
        raise UserError(f"--mesh {mesh}: {error}") from None
    return fitted


def fit_mesh_to(mesh: MeshShape, name: str) -> MeshShape:
    """Return `fit_mesh` for a model's folder or hub id, which is looked for only where the mesh splits heads."""
    return mesh if mesh.tensor == 1 else fit_mesh(mesh, read_config(find_model(name)))
