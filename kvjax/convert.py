"""`python -m kvjax.convert`: write any supported model as a Hugging Face folder or an Orbax export."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from kvjax.cli.launch import MeshShape, parse_command, run_command, start

ORBAX = "orbax"
"""The folder of an export's arrays, next to config.json and the tokenizer."""


@dataclasses.dataclass(frozen=True)
class ConvertConfig:
    """Write a model as a Hugging Face folder: config.json, safetensors, tokenizer and generation defaults."""

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """A GGUF file, a model folder, a hub id, `builtin`, or an Orbax export of this command."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """The folder to write. It must not exist, or be empty; it appears whole or not at all."""
    dtype: str | None = None
    """float32, bfloat16 or float16; by default the dtype of the weights, or float32 if they are quantised."""
    to: Literal["huggingface", "orbax"] = "huggingface"
    """The format. orbax writes the arrays, with kvjax's names, as an Orbax checkpoint in the folder `orbax`."""


def run(config: ConvertConfig) -> None:
    """Read the model and write it. Raises UserError for errors that a user can fix."""
    import jax

    from kvjax.checkpoints.orbax import export
    from kvjax.models import save_model
    from kvjax.models.decoder import unfused_values
    from kvjax.models.saving import check_new, new_folder

    check_new(config.out)
    with jax.set_mesh(start(MeshShape(), alone=True)):
        model = _read(config)
        if config.to == "orbax":
            with new_folder(model, config.out, config.source) as partial:
                export(partial / ORBAX, unfused_values(model))
        else:
            save_model(model, config.out, tokenizer_from=config.source)
    size = sum(x.nbytes for x in jax.tree.leaves(model)) / 2**20
    print(f"{config.out}: {model.config.model_type}, {model.dtype.name}, {size:.0f} MiB")


def _read(config: ConvertConfig):
    """Return the model of the source, which may be an Orbax export."""
    import jax
    import jax.numpy as jnp

    from kvjax.checkpoints.orbax import abstract, restore_export
    from kvjax.errors import UserError
    from kvjax.models import load_model, read_config
    from kvjax.models.decoder import unfused_values
    from kvjax.models.folder import find_model
    from kvjax.models.json_file import JsonObject
    from kvjax.models.kinds import few
    from kvjax.models.loading import model_shapes, parameter_dtype

    source = find_model(config.source)
    if not (source / ORBAX).is_dir():
        return load_model(source, config.dtype)
    shape = read_config(source)
    stored = JsonObject.read(source / "config.json").get("torch_dtype", str)
    dtype = parameter_dtype(config.dtype or stored)
    like = model_shapes(shape, dtype)
    arrays = restore_export(source / ORBAX, abstract(unfused_values, jax.sharding.get_mesh(), like))
    finite = jax.jit(lambda arrays: {name: jnp.isfinite(x).all() for name, x in arrays.items()})
    if broken := [name for name, is_finite in jax.device_get(finite(arrays)).items() if not is_finite]:
        raise UserError(f"{source / ORBAX}: NaN or infinite numbers in {few(broken)}, read as {dtype.name}")
    return like.with_unfused(arrays)


def main(args: list[str] | None = None) -> None:
    """Run the command line."""
    run(parse_command(ConvertConfig, args))


if __name__ == "__main__":
    run_command(main)
