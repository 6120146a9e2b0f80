"""Read Hugging Face folders and GGUF files as models sharded over the current mesh."""

import dataclasses
import functools
import math
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, reshard
from jaxtyping import Array, Float32, Int

from kvjax.errors import UserError, named_arguments, shown, warn, whole_number
from kvjax.mesh import AXES, P, axis_size, gather, names_in, use_mesh
from kvjax.models.adapter import base_of, merge
from kvjax.models.config import ModelConfig, read_config, warn_of_turn_ends
from kvjax.models.decoder import Decoder
from kvjax.models.families import FAMILIES
from kvjax.models.folder import find_model, load_tokenizer
from kvjax.models.fp8 import with_scales_by_row
from kvjax.models.gguf_file import GgufFile, is_gguf
from kvjax.models.kinds import few, kind_of_tensors
from kvjax.models.layout import SCALE, flat_shape, fuse, parts_of, scales_of
from kvjax.models.names import (
    EXPERT,
    MATRICES,
    SCALES,
    TOP,
    Axis,
    by_expert,
    by_path,
    in_layers,
    is_rotary_table,
    layer_name,
    split,
)
from kvjax.models.rope import inverse_frequencies, turned
from kvjax.models.tensor_files import (
    DTYPES,
    FLOAT8,
    ColumnsOfTensors,
    RowsOfTensor,
    TensorInFile,
    ignored_files,
    stored_tensors,
)
from pallas_kernels.eight_bits import EIGHT_BITS, quantised

Arrays = dict[str, Array]
Axes = tuple[Axis, Axis]
"""The mesh axes over which a file's rows and columns are split."""


@named_arguments()
def load_model(
    path_or_hub_id: str | os.PathLike[str],
    dtype: Any = None,
    *,
    weights: str | None = None,
    kv_cache_dtype: str | None = None,
    max_length: int | None = None,
) -> Decoder:
    """Read a model of one of the `FAMILIES` onto the current mesh.

    Each process reads its share of every tensor's rows, and devices exchange what they need: no byte is read twice,
    except those of a tied model's head, which every process compares with the embedding. Host memory peaks near one
    layer's share, because a layer is on the devices before the next is read.

    Args:
        path_or_hub_id: a folder with `config.json` and safetensors, a folder with a LoRA adapter of such a model, which
            is merged onto it, a GGUF file (gemma3, llama, phi3, qwen2, qwen3, qwen3moe), or a Hugging Face hub id.
        dtype: of the parameters, "float32", "bfloat16" or "float16"; None: as the embedding table is stored, float32
            where that is quantised.
        weights: "int8" or "fp8" (e4m3): store the layers' matrices in 8 bits, with a scale for each output, rounded to
            the nearest. Products are made in `dtype`, sums in float32. Such a model takes about half the memory of
            bfloat16 and cannot be trained itself; its gates can. None: in `dtype`, or as FP8 files have them.
        kv_cache_dtype: "int8": caches of this model hold int8 entries, each key and each value with a scale, in about
            half the memory of 16 bits; None: in `dtype`. Windows of sliding-window layers are in `dtype`.
        max_length: the longest sequence that will be run, for models with "dynamic" or "longrope" rope; by default what
            the model declares.

    Raises:
        UserError: whatever is wrong with the files, in one line; a weight that is NaN or infinite, in the file or in
            `dtype`; a mesh axis that does not divide what it splits.
    """
    dtype, max_length = _checked(dtype, max_length)
    model = find_model(path_or_hub_id)
    config = read_config(model, max_length, weights, kv_cache_dtype)
    config = dataclasses.replace(config, name=str(path_or_hub_id))
    warn_of_turn_ends(config)
    stored = _stored(model, config)
    with use_mesh():
        dtype = _stored_dtype(stored.get(TOP["embed"])) if dtype is None else dtype
        abstract = model_shapes(config, dtype)
        wanted, tree = by_path(abstract)
        _check(model, config, stored, wanted)

        layers = {path: leaf for path, leaf in wanted.items() if in_layers(path)}
        parts = [part for path in layers if _is_stored(path, config) for part in parts_of(path)]
        layer_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in layers.values()) // config.num_layers
        placed = _zeros(tuple(layers.items()))
        mesh = jax.sharding.get_mesh()
        axes = {path: split(path, leaf) for path, leaf in wanted.items()}
        for index in range(config.num_layers):
            tensors = _layer_tensors(stored, config, parts, index)
            own = {
                part: (tensors[part], axes[path])
                for path in layers
                for part in parts_of(path)
                if part in tensors
            }
            raw = {part: _read(tensor, mesh, split) for part, (tensor, split) in own.items()}
            # waiting keeps one layer at a time in host memory
            placed, largest = jax.block_until_ready(_place_layer(placed, np.int32(index), raw, config))
            del raw
            _check_finite(model, dtype, [(tensor.name, largest[part]) for part, (tensor, _) in own.items()])
        for path in (path for path in wanted if path in TOP):
            rows, tensor = wanted[path].shape[0], stored[TOP[path]]
            pieces = _read(tensor, mesh, axes[path], rows, layer_bytes)
            kind = np.dtype(wanted[path].dtype)
            found, largest = _place_top(pieces, axes[path], kind)
            placed |= zip((path, path + SCALE), found, strict=False)
            _check_finite(model, dtype, [(tensor.name, largest)])
        return jax.tree.unflatten(tree, [placed[path] for path in wanted])


@named_arguments()
def load(
    path_or_hub_id: str | os.PathLike[str],
    dtype: Any = None,
    *,
    weights: str | None = None,
    kv_cache_dtype: str | None = None,
    max_length: int | None = None,
) -> tuple[Decoder, Any]:
    """Return a model and its tokenizer: `model, tokenizer = kvjax.load("Qwen/Qwen3-4B")`. They are read as by
    `load_model` and `load_tokenizer`, the tokenizer first."""
    dtype, max_length = _checked(dtype, max_length)
    tokenizer = load_tokenizer(path_or_hub_id)
    stored = {"weights": weights, "kv_cache_dtype": kv_cache_dtype}
    return load_model(path_or_hub_id, dtype, **stored, max_length=max_length), tokenizer


def _is_stored(path: str, config: ModelConfig) -> bool:
    """Return True if a model's files hold one of a decoder's arrays: all but the scales of what is quantised here."""
    return bool(config.weight_block) or not path.endswith(SCALE)


def _checked(dtype: Any, max_length: int | None) -> tuple[np.dtype | None, int | None]:
    longest = None if max_length is None else whole_number("load_model", "max_length", max_length, most=2**62)
    return None if dtype is None else parameter_dtype(dtype), longest


def model_shapes(config: ModelConfig, dtype: Any = jnp.float32) -> Decoder:
    """Return a model that has only shapes, with their shardings on the current mesh."""
    return jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype))


def _stored_dtype(embed: TensorInFile | None) -> np.dtype:
    """Return the dtype of the embedding table. It is float32 if there is no table or its dtype is not supported, which
    the checks then report."""
    return DTYPES.get(embed.kind, DTYPES["F32"]) if embed else DTYPES["F32"]


def parameter_dtype(wanted: Any) -> np.dtype:
    """Return the dtype that parameters are asked to have. Raises UserError for one that they cannot have."""
    names = {dtype.name: dtype for dtype in DTYPES.values()}
    name = getattr(wanted, "__name__", None) or getattr(wanted, "name", None) or wanted
    if not isinstance(name, str) or name not in names:
        raise UserError(f"dtype {shown(wanted)} is not supported, only {', '.join(names)}")
    return names[name]


def _stored(model: Path, config: ModelConfig) -> dict[str, TensorInFile]:
    """Return the tensors of a model by their Hugging Face names, without those that add nothing: a tied head and rotary
    frequencies."""
    base = base_of(model)
    if is_gguf(base):
        stored = GgufFile.read(base).hugging_face_tensors()
    else:
        stored = FAMILIES[config.model_type].text_tensors(stored_tensors(base))
        if config.weight_block:
            stored = with_scales_by_row(stored)
        own, ignored = ignored_files(base)
        if ignored:
            text = f"{base}: {own} is read, as in transformers; beside it {', '.join(ignored)} is ignored"
            warn(text, stacklevel=4)
    # names are made for every layer from here on
    if config.num_layers * max(1, config.num_experts) > len(stored):
        experts = f" of {config.num_experts:,} experts" if config.num_experts else ""
        raise UserError(
            f"{model}: the config has {config.num_layers:,} layers{experts}, but the weights only "
            f"{len(stored):,} tensors"
        )
    if config.tied:
        head = stored.pop(TOP["head"], None)
        if head is not None:
            stored.setdefault(TOP["embed"], head)
    for name in [name for name in stored if is_rotary_table(name, config.num_layers)]:
        _check_rotary_table(model, config, stored.pop(name))
    return stored if base == model else merge(model, stored)


def _check_rotary_table(model: Path, config: ModelConfig, table: TensorInFile) -> None:
    """Refuse rotary frequencies in a file that are not the config's, because the weights are then another model's."""
    # a sequence's length changes those of "dynamic"; older code stored those of "linear" before it divided them
    scaled = dataclasses.replace(config.rope, length=0)
    accepted = [scaled] + [dataclasses.replace(scaled, type="default")] * (scaled.type == "linear")
    if table.shape == (turned(config.rope, config.head_dim) // 2,) and table.kind in DTYPES:
        found = table.read().astype(np.float32)
        # float16 has no finer steps for the slowest pairs
        rtol = 1e-3 if table.kind == "F32" else 2**-7
        for rope in accepted:
            if np.allclose(found, inverse_frequencies(rope, config.head_dim), rtol=rtol, atol=6e-8):
                return
    raise UserError(
        f"{model}: {few([table.name])} are not the rotary frequencies of the config (rope_theta, rope_scaling)"
    )


def _check(model: Path, config: ModelConfig, stored: dict[str, TensorInFile], wanted: dict[str, Any]) -> None:
    """Raise one UserError that says how the tensors differ from the config."""
    shapes, in_layer = {}, {}
    for path, leaf in wanted.items():
        if path in TOP:
            shapes[TOP[path]] = (config.vocab_size, *leaf.shape[1:]) if leaf.ndim == 2 else leaf.shape
        if path in TOP or not _is_stored(path, config):
            continue
        for part in parts_of(path):
            name, (rows, *columns) = config.layer_names[part], flat_shape(part, config)[::-1]
            for one in (names := by_expert(name, config.num_experts)):
                before = in_layer[one][0] if one in in_layer else 0
                in_layer[one] = before + rows, *(size // len(names) for size in columns)
    for layer in range(config.num_layers):
        shapes |= {layer_name(name, layer): shape for name, shape in in_layer.items()}
    unexpected = [tensor.name for name, tensor in stored.items() if name not in shapes]
    both = [(stored[name], shape) for name, shape in shapes.items() if name in stored]
    faults = {
        "missing": [name for name in shapes if name not in stored],
        "unexpected": unexpected,
        "misshapen": [f"{t.name} is {t.shape}, expected {shape}" for t, shape in both if t.shape != shape],
        "of an unsupported dtype": [
            f"{stored[name].name} is {stored[name].kind}"
            for name in shapes
            if name in stored and stored[name].kind not in ((FLOAT8,) if name + SCALES in shapes else DTYPES)
        ],
    }
    faults = {fault: names for fault, names in faults.items() if names}
    if not faults:
        return
    odd = [*unexpected, *faults.get("of an unsupported dtype", [])]
    if not config.num_experts and (kind := kind_of_tensors(odd)):
        raise UserError(f"{model}: holds {kind}, expected the plain weights of a {config.model_type} model")
    if faults == {"missing": [TOP["head"]]}:
        raise UserError(
            f"{model}: the output head ({TOP['head']}) is missing, and the config does not say tie_word_embeddings"
        )
    lines = "; ".join(
        f"{fault}: {few(names, 3 if len(faults) < 3 else 2)}" for fault, names in faults.items()
    )
    raise UserError(f"{model}: the weights are not those of its config; {lines}")


def _layer_tensors(
    stored: dict[str, TensorInFile], config: ModelConfig, parts: list[str], layer: int
) -> dict[str, TensorInFile]:
    """Return a layer's own arrays. Each is all of the tensor that has its name, or its own rows of it."""
    found, taken = {}, dict.fromkeys(config.layer_names.values(), 0)
    for part in parts:
        name = config.layer_names[part]
        if EXPERT in name:
            names = (layer_name(one, layer) for one in by_expert(name, config.num_experts))
            found[part] = ColumnsOfTensors.of([stored[one] for one in names])
            continue
        whole, first, rows = stored[layer_name(name, layer)], taken[name], flat_shape(part, config)[-1]
        taken[name] += rows
        shape = rows, *whole.shape[1:]
        own = whole.shape == shape
        found[part] = whole if own else RowsOfTensor(whole.name, whole.file, shape, whole.kind, whole, first)
    return found


def _check_finite(model: Path, dtype: np.dtype, largest: list[tuple[str, Array]]) -> None:
    """Refuse tensors by name whose largest magnitude is not finite, or no longer is in the model's dtype."""
    found: list[tuple[str, np.ndarray]] = jax.device_get(largest)
    if broken := list(dict.fromkeys(name for name, x in found if not np.isfinite(x))):
        raise UserError(f"{model}: NaN or infinite numbers in {few(broken)}")
    with np.errstate(over="ignore"):
        over = list(dict.fromkeys(name for name, x in found if np.isinf(x.astype(dtype))))
    if over:
        most, wider = float(jnp.finfo(dtype).max), "bfloat16 or float32" if dtype == np.float16 else "float32"
        raise UserError(
            f"{model}: {few(over)} has numbers beyond {most:,.6g}, the largest of {dtype.name}: use {wider}"
        )


@functools.partial(jax.jit, static_argnums=0)
def _zeros(leaves: tuple[tuple[str, jax.ShapeDtypeStruct], ...]) -> Arrays:
    return {path: jnp.zeros(leaf.shape, leaf.dtype, out_sharding=leaf.sharding.spec) for path, leaf in leaves}


def _read(
    tensor: TensorInFile, mesh: Mesh, axes: Axes, rows: int | None = None, most: int | None = None
) -> list[Array]:
    """Return a stored tensor in equal pieces that `_join` puts together: [parts, rows of a part, ...].

    The parts are those of the mesh axis that will split the rows; all other devices share out a part's rows, so that
    each is read once, by one process. `rows` pads the tensor with zeros; `most` is about how many bytes of it may be in
    host memory at a time.
    """
    rows_axis, columns_axis = axes
    parts = axis_size(*names_in(rows_axis))
    part = (rows or tensor.shape[0]) // parts
    shared: tuple[str, ...] = ()
    # the columns' axis first: then only neighbours exchange what they read
    others = [axis for axis in AXES if axis not in names_in(rows_axis)]
    for axis in sorted(others, key=lambda axis: axis not in names_in(columns_axis)):
        if part % axis_size(*shared, axis) == 0:
            shared = (*shared, axis)
    count, row_bytes = 1, tensor.dtype.itemsize * math.prod(tensor.shape[1:])
    while most and parts * part // count * row_bytes > most and part % (2 * count * axis_size(*shared)) == 0:
        count *= 2
    piece = part // count
    columns = tensor.shape[1:]
    sharding = NamedSharding(mesh, P(rows_axis, shared or None, *[None] * len(columns)))

    def read(start, index):
        first, last, _ = index[0].indices(parts)
        low, high, _ = index[1].indices(piece)
        out = np.zeros((last - first, high - low, *columns), tensor.dtype)
        for number in range(first, last):
            tensor.fill(out[number - first], number * part + start + low)
        return out

    arrays = []
    for start in range(0, part, piece):
        array = jax.make_array_from_callback(
            (parts, piece, *columns), sharding, functools.partial(read, start)
        )
        arrays.append(jax.block_until_ready(array))
    return arrays


def _join(pieces: list[Array], axes: Axes) -> Array:
    """Return the whole tensor, its rows and columns split over the two axes of `axes`."""
    rows_axis, columns_axis = axes
    columns = () if pieces[0].ndim == 2 else (columns_axis,)
    others = [axis for axis in AXES if axis not in names_in(*axes)]
    pieces = [reshard(gather(piece, *others), P(rows_axis, None, *columns)) for piece in pieces]
    x = jnp.concatenate(pieces, axis=1)
    return jnp.reshape(x, (-1, *x.shape[2:]), out_sharding=P(rows_axis, *columns))


def _largest(x: Array) -> Float32[Array, ""]:
    """Return the largest magnitude, infinity where there is a NaN, which a maximum over devices may lose."""
    x = x.astype(jnp.float32)
    return jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x)).max()


@functools.partial(jax.jit, static_argnums=(1, 2))
def _place_top(pieces: list[Array], axes: Axes, dtype: np.dtype) -> tuple[tuple[Array, ...], Array]:
    """Return the tensor in the given dtype, in 8 bits with the scales of its rows, and `_largest` of it before that."""
    x = _join(pieces, axes)
    if dtype not in EIGHT_BITS.values():
        return (x.astype(dtype),), _largest(x)
    values, scale = quantised(x.T, dtype)
    return (values.T, scale[0]), _largest(x)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=3)
def _place_layer(
    layers: Arrays, index: Int[Array, ""], raw: dict[str, list[Array]], config: ModelConfig
) -> tuple[Arrays, Arrays]:
    """Return `layers` with one of them replaced by what the files hold, and `_largest` of each tensor."""
    own, axes = {}, {part: split(path, stack) for path, stack in layers.items() for part in parts_of(path)}
    for part, pieces in raw.items():
        own[part] = _join(pieces, axes[part]).T
    largest = {part: _largest(x) for part, x in own.items()}
    if config.weights is not None and not config.weight_block:
        kind = EIGHT_BITS[config.weights]
        for part in MATRICES:
            own[part], own[part + SCALE] = quantised(own[part], kind, scales_of(part, config))
    placed = {}
    for path, stack in layers.items():
        layer = fuse(path, {part: own[part].astype(stack.dtype) for part in parts_of(path)}, config)
        placed[path] = jax.lax.dynamic_update_index_in_dim(stack, layer, index, 0)
    return placed, largest
