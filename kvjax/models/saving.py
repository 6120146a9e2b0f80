"""Models to Hugging Face folders."""

import functools
import os
import shutil
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import reshard
from jaxtyping import Array, Int
from safetensors import SafetensorError
from safetensors.numpy import save_file

from kvjax.errors import UserError
from kvjax.mesh import P, use_mesh
from kvjax.models.config import config_json
from kvjax.models.decoder import Decoder
from kvjax.models.folder import copy_tokenizer
from kvjax.models.json_file import write_json
from kvjax.models.names import TOP, by_path, layer_name, to_hf
from kvjax.models.tensor_files import INDEX, SINGLE

FILE_BYTES = 2 << 30
"""A saved file is closed when it has reached this size."""

Arrays = dict[str, Array]


def save_model(
    model: Decoder,
    folder: str | os.PathLike[str],
    tokenizer_from: str | os.PathLike[str] | None = None,
) -> None:
    """Write a folder that transformers (and `load_model`) loads. It appears whole or not at all.

    With several processes every one calls this, and the first writes.

    Args:
        folder: must not exist, or be empty.
        tokenizer_from: a model folder or hub id whose tokenizer and generation defaults are copied along.

    Raises:
        UserError: a folder that holds something, a model that no Hugging Face class matches.
        OSError: the disk is full or not writable; nothing is left behind.
    """
    folder = Path(folder).expanduser().absolute()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder}: exists and is not an empty folder, give another one")
    config = config_json(model.config, model.embed.dtype.name)
    writes = jax.process_index() == 0
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    try:
        if writes:
            partial.mkdir(parents=True)
            if tokenizer_from is not None:
                copy_tokenizer(tokenizer_from, partial)
            write_json(partial / "config.json", config)
        with use_mesh(model):
            _write_tensors(model, partial, writes)
        if writes:
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    multihost_utils.sync_global_devices(f"saved {folder}")


@jax.jit
def _take_layer(layers: Arrays, index: Int[Array, ""]) -> Arrays:
    """One layer as the files hold it, whole on every device."""
    return {path: to_hf(path, stack[index]) for path, stack in layers.items()}


@functools.partial(jax.jit, static_argnums=1)
def _take_top(top: Arrays, vocab_size: int) -> Arrays:
    whole = {path: reshard(x, P(*[None] * x.ndim)) for path, x in top.items()}
    return {path: x[:vocab_size] if x.ndim == 2 else x for path, x in whole.items()}


def _write_tensors(model: Decoder, folder: Path, writes: bool) -> None:
    """The weights in files of about `FILE_BYTES`, a whole number of layers in each, with an index if they are several.

    Processes that do not write take part: taking a tensor off the mesh needs them all.
    """
    leaves, _ = by_path(model)
    layers = {path: x for path, x in leaves.items() if path not in TOP}
    top = {path: x for path, x in leaves.items() if path in TOP}
    layer_bytes = sum(x.nbytes for x in layers.values()) // model.config.num_layers
    per_file = max(FILE_BYTES // max(layer_bytes, 1), 1)
    starts = range(0, model.config.num_layers, per_file)
    small = len(starts) == 1 and sum(x.nbytes for x in leaves.values()) <= FILE_BYTES
    count = 1 if small else len(starts) + 1
    weight_map, total = {}, 0

    def write(number, tensors):
        nonlocal total
        name = SINGLE if small else f"model-{number:05}-of-{count:05}.safetensors"
        weight_map.update(dict.fromkeys(tensors, name))
        total += sum(x.nbytes for x in tensors.values())
        if writes:
            _write_file(folder / name, tensors)

    tensors = {TOP[path]: np.asarray(x) for path, x in _take_top(top, model.config.vocab_size).items()}
    if not small:
        write(1, tensors)
        tensors = {}
    for number, start in enumerate(starts, 2):
        for index in range(start, min(start + per_file, model.config.num_layers)):
            layer = _take_layer(layers, np.int32(index))
            tensors |= {layer_name(path, index): np.asarray(x) for path, x in layer.items()}
        write(number, tensors)
        tensors = {}
    if writes and not small:
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_file(path: Path, tensors: dict[str, np.ndarray]) -> None:
    try:
        save_file(
            {name: np.ascontiguousarray(x) for name, x in tensors.items()}, path, metadata={"format": "pt"}
        )
    except SafetensorError as error:
        raise OSError(f"{path}: could not be written ({error})") from None
    with path.open("rb") as file:
        os.fsync(file.fileno())
