"""Shapes of models, without weights, and checks of meshes and lengths against them. The `config.json` of well-known
models is in this folder."""

import dataclasses
from pathlib import Path

from kvjax.builtin import BUILTIN
from kvjax.cli.launch import MeshShape
from kvjax.errors import UserError, warn
from kvjax.models import decoder
from kvjax.models.adapter import base_path
from kvjax.models.config import ModelConfig, read_config
from kvjax.models.folder import find_model
from kvjax.models.gguf_file import is_gguf
from kvjax.models.json_file import JsonObject

SHAPES = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """The properties of a model that compilation needs."""

    config: ModelConfig
    """Sizes and flags."""
    dtype: str
    """The dtype of the weights that `config.json` states; float32 if it states none."""


def known_shapes() -> list[str]:
    """Return the names of the shapes that come with kvjax."""
    return sorted(path.parent.name for path in SHAPES.glob("*/config.json"))


def find_shape(
    name: str, max_length: int | None = None, weights: str | None = None, kv_cache_dtype: str | None = None
) -> ModelShape:
    """Return the shape of a model, given a known name (`llama-3.1-8b`, or a hub id whose name begins with one), a
    folder with a `config.json`, a GGUF file, or `builtin`. Nothing is fetched.

    Args:
        max_length: as in `read_config`.
        weights: as in `read_config`.
        kv_cache_dtype: as in `read_config`.

    Raises:
        UserError: there is no such shape.
    """
    path = Path(name).expanduser()
    if name == BUILTIN or path.exists():
        model = base_path(find_model(name))
    else:
        stem = name.rpartition("/")[2].lower()
        matches = [shape for shape in known_shapes() if stem == shape or stem.startswith(shape + "-")]
        if not matches:
            raise UserError(
                f"--model {name}: no such folder and no known shape; known are {', '.join(known_shapes())}; a folder "
                "needs only config.json"
            )
        model = SHAPES / max(matches, key=len)
    config = read_config(model, max_length, weights, kv_cache_dtype)
    if is_gguf(model):
        return ModelShape(config, "float32")
    keys = JsonObject.read(model / "config.json")
    dtype = keys.get("torch_dtype", str, None) or keys.get("dtype", str, "float32")
    return ModelShape(config, dtype)


def warn_if_too_long(config: ModelConfig, tokens: int, subject: str = "") -> None:
    """Warn if sequences are longer than the model's context. `subject`: the beginning of the warning, instead of the
    number of tokens."""
    if tokens > config.longest:
        subject = subject or f"{tokens:,} tokens are more"
        warn(
            f"{subject} than the {config.longest:,} that the model declares or was trained for", stacklevel=2
        )


def fit_mesh(mesh: MeshShape, config: ModelConfig) -> MeshShape:
    """Return the mesh that a model uses (`MeshShape.for_heads`). No devices are needed. Raises UserError if the mesh
    does not divide the model."""
    fitted = mesh.for_heads(config.num_kv_heads)
    try:
        decoder.check_mesh(config, dataclasses.asdict(fitted))
    except UserError as error:
        raise UserError(f"--mesh {mesh}: {error}") from None
    return fitted


def fit_mesh_to(mesh: MeshShape, name: str) -> MeshShape:
    """Return `fit_mesh` for a model's folder or hub id. The model is read only if the mesh splits heads."""
    return mesh if mesh.tensor == 1 else fit_mesh(mesh, read_config(find_model(name)))
