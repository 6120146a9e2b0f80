"""Writing of models as Hugging Face folders."""

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, Int

from kvjax.errors import UserError, named_arguments, shown
from kvjax.files import partial_folder, write_tensors
from kvjax.mesh import on_host, use_mesh
from kvjax.models.config import ModelConfig, config_json
from kvjax.models.decoder import Decoder
from kvjax.models.folder import copy_tokenizer
from kvjax.models.json_file import write_json
from kvjax.models.layout import parts_of, reorder_heads, unfuse
from kvjax.models.names import TOP, by_expert, by_path, layer_name
from kvjax.models.tensor_files import INDEX, SINGLE

FILE_BYTES = 2 << 30
"""The maximum size of a saved file, unless one layer or the embedding is larger."""

Arrays = dict[str, Array]


@named_arguments()
def save_model(
    model: Decoder,
    folder: str | os.PathLike[str],
    tokenizer_from: str | os.PathLike[str] | None = None,
) -> None:
    """Write a folder that transformers and `load_model` can load. It appears whole or not at all.

    Call this in every process; only the first one writes.

    Args:
        folder: must not exist, or be empty.
        tokenizer_from: a model folder, GGUF file or hub id whose tokenizer and generation defaults are also copied.

    Raises:
        UserError: the folder is not empty or cannot be made, or no Hugging Face class matches the model.
        OSError: the disk is full or not writable; nothing is left behind.
    """
    if not isinstance(model, Decoder):
        raise UserError(f"save_model: model must come from kvjax.load_model, got {shown(model)}")
    if not isinstance(folder, str | os.PathLike):
        raise UserError(f"save_model: folder must be a path, got {shown(folder)}")
    with new_folder(model, folder, tokenizer_from) as partial, use_mesh(model):
        _write_tensors(model, partial, writes=jax.process_index() == 0)


def check_new(folder: str | os.PathLike[str]) -> Path:
    """Return the absolute path. Raises UserError if the path exists and is not an empty folder, or if no folder can be
    made there."""
    folder = Path(folder).expanduser().absolute()
    parent = folder.parent
    try:
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise UserError(f"{folder}: exists and is not an empty folder, give another one")
        parent = next(path for path in folder.parents if path.exists())
        # permissions are not enough to know: root has all of them, yet cannot write to /proc
        with partial_folder(parent / folder.name):
            pass
    except OSError as error:
        raise UserError(f"{folder}: no folder can be made there ({parent}: {error.strerror})") from None
    return folder


@contextlib.contextmanager
def new_folder(
    model: Decoder, folder: str | os.PathLike[str], tokenizer_from: str | os.PathLike[str] | None
) -> Iterator[Path]:
    """Yield a partial folder with the model's config and tokenizer, for the caller to write weights to. It is moved to
    `folder` at the end. Raises the errors of `save_model`."""
    folder = check_new(folder)
    config = config_json(model.config, model.dtype.name)
    if jax.process_index() == 0:
        with partial_folder(folder) as partial:
            if tokenizer_from is not None:
                copy_tokenizer(tokenizer_from, partial)
            write_json(partial / "config.json", config)
            yield partial
            # another process may have made it meanwhile
            check_new(folder)
            partial.rename(folder)
    else:
        yield folder
    multihost_utils.sync_global_devices(f"saved {folder}")


@functools.partial(jax.jit, static_argnums=2)
def _take_layer(layers: Arrays, index: Int[Array, ""], config: ModelConfig) -> Arrays:
    """Return one layer's arrays in the layout of files."""
    return {
        part: x.T for path, stack in layers.items() for part, x in unfuse(path, stack[index], config).items()
    }


def _parts(model: Decoder) -> Iterator[dict[str, np.ndarray]]:
    """Yield the tensors outside layers, then those of each layer. Call this in every process."""
    leaves, _ = by_path(model)
    top = {TOP[path]: on_host(x) for path, x in leaves.items() if path in TOP}
    yield {name: x[: model.config.vocab_size] if x.ndim == 2 else x for name, x in top.items()}
    layers = {path: x for path, x in leaves.items() if path not in TOP}
    if model.config.head_order is not None:
        order = model.config.place_of_head
        layers = {path: reorder_heads(path, x, model.config, order) for path, x in layers.items()}
    for index in range(model.config.num_layers):
        layer = _take_layer(layers, np.int32(index), model.config)
        rows: dict[str, list[np.ndarray]] = {}
        for part in (part for path in layers for part in parts_of(path)):
            names = by_expert(layer_name(model.config.layer_names[part], index), model.config.num_experts)
            for name, x in zip(names, np.split(on_host(layer[part]), len(names), -1), strict=True):
                rows.setdefault(name, []).append(x)
        yield {
            name: np.ascontiguousarray(x[0]) if len(x) == 1 else np.concatenate(x) for name, x in rows.items()
        }


def _bytes(tensors: dict[str, np.ndarray]) -> int:
    return sum(x.nbytes for x in tensors.values())


def _write_tensors(model: Decoder, folder: Path, writes: bool) -> None:
    """Write the weights in files of at most `FILE_BYTES`, with an index if there are several files."""
    files: list[list[str]] = []
    total, pending = 0, {}

    def write():
        if writes:
            write_tensors(folder / f"{len(files)}.safetensors", pending, metadata={"format": "pt"})
        files.append(list(pending))

    for part in _parts(model):
        if pending and _bytes(pending) + _bytes(part) > FILE_BYTES:
            write()
            pending = {}
        pending |= part
        total += _bytes(part)
    write()
    if not writes:
        return
    names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    names = names if len(files) > 1 else [SINGLE]
    for number, name in enumerate(names):
        (folder / f"{number}.safetensors").rename(folder / name)
    if len(files) > 1:
        weight_map = {tensor: name for name, tensors in zip(names, files, strict=True) for tensor in tensors}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
