"""Loading of Hugging Face folders and GGUF files as models sharded over the current mesh."""

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
from kvjax.models.adapter import base_path, merge
from kvjax.models.config import ModelConfig, read_config, warn_of_turn_ends
from kvjax.models.decoder import Decoder
from kvjax.models.families import FAMILIES
from kvjax.models.folder import find_model, load_tokenizer
from kvjax.models.fp8 import with_scales_by_row
from kvjax.models.gguf_file import GgufFile, is_gguf
from kvjax.models.kinds import few, kind_of_tensors
from kvjax.models.layout import SCALE, flat_shape, fuse, parts_of, scale_count
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
from kvjax.models.rope import inverse_frequencies, rotated_dims
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
"""The mesh axes that split the rows and the columns of a file's tensor."""


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

    Each process reads its share of every tensor's rows, and devices exchange what they need, so no byte is read twice.
    The exception is the head of a tied model, which every process compares with the embedding. Host memory peaks near
    one layer's share, because a layer is on the devices before the next is read.

    Args:
        path_or_hub_id: a folder with `config.json` and safetensors, a folder with a LoRA adapter (which is merged into
            its base model), a GGUF file (gemma3, llama, phi3, qwen2, qwen3, qwen3moe), or a Hugging Face hub id.
        dtype: the parameters' dtype, "float32", "bfloat16" or "float16"; None: the dtype of the stored embedding table,
            or float32 if that is quantised.
        weights: "int8" or "fp8" (e4m3): store the layers' matrices in 8 bits, rounded to nearest, with a scale for each
            output. Products are in `dtype`, sums in float32. Such a model takes about half the memory of bfloat16. It
            cannot be trained, but gates for it can. None: `dtype`, or 8 bits if the files are FP8.
        kv_cache_dtype: "int8": caches of this model hold int8 entries, with a scale for each key and each value, in
            about half the memory of 16 bits; None: `dtype`. Windows of sliding-window layers are always in `dtype`.
        max_length: the longest sequence that will be run, for models with "dynamic" or "longrope" rope; by default the
            context that the model declares.

    Raises:
        UserError: the files are faulty or not supported, a weight is NaN or infinite (in the file or in `dtype`), or a
            mesh axis does not divide a size that it splits.
    """
    dtype, max_length = _check_arguments(dtype, max_length)
    model = find_model(path_or_hub_id)
    config = read_config(model, max_length, weights, kv_cache_dtype)
    config = dataclasses.replace(config, name=str(path_or_hub_id))
    warn_of_turn_ends(config)
    stored = _stored(model, config)
    with use_mesh():
        dtype = _stored_dtype(stored.get(TOP["embed"])) if dtype is None else dtype
        abstract = model_shapes(config, dtype)
        leaves, tree = by_path(abstract)
        _check_tensors(model, config, stored, leaves)

        layers = {path: leaf for path, leaf in leaves.items() if in_layers(path)}
        parts = [part for path in layers if _is_stored(path, config) for part in parts_of(path)]
        layer_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in layers.values()) // config.num_layers
        placed = _zeros(tuple(layers.items()))
        mesh = jax.sharding.get_mesh()
        axes = {path: split(path, leaf) for path, leaf in leaves.items()}
        for index in range(config.num_layers):
            tensors = _layer_tensors(stored, config, parts, index)
            sources = {
                part: (tensors[part], axes[path])
                for path in layers
                for part in parts_of(path)
                if part in tensors
            }
            raw = {part: _read_pieces(tensor, mesh, split) for part, (tensor, split) in sources.items()}
            # waiting keeps one layer at a time in host memory
            placed, largest = jax.block_until_ready(_place_layer(placed, np.int32(index), raw, config))
            del raw
            names = {part: tensor.name for part, (tensor, _) in sources.items()}
            _check_finite(model, dtype, [(name, largest[part]) for part, name in names.items()])
        for path in (path for path in leaves if path in TOP):
            rows, tensor = leaves[path].shape[0], stored[TOP[path]]
            pieces = _read_pieces(tensor, mesh, axes[path], rows, layer_bytes)
            arrays, largest = _place_top(pieces, axes[path], np.dtype(leaves[path].dtype))
            placed |= zip((path, path + SCALE), arrays, strict=False)
            _check_finite(model, dtype, [(tensor.name, largest)])
        return jax.tree.unflatten(tree, [placed[path] for path in leaves])


@named_arguments()
def load(
    path_or_hub_id: str | os.PathLike[str],
    dtype: Any = None,
    *,
    weights: str | None = None,
    kv_cache_dtype: str | None = None,
    max_length: int | None = None,
) -> tuple[Decoder, Any]:
    """Return a model and its tokenizer: `model, tokenizer = kvjax.load("Qwen/Qwen3-4B")`. The arguments are those of
    `load_model`. The tokenizer is read first, with `load_tokenizer`."""
    dtype, max_length = _check_arguments(dtype, max_length)
    tokenizer = load_tokenizer(path_or_hub_id)
    stored = {"weights": weights, "kv_cache_dtype": kv_cache_dtype}
    return load_model(path_or_hub_id, dtype, **stored, max_length=max_length), tokenizer


def _is_stored(path: str, config: ModelConfig) -> bool:
    """Return True if the model's files hold this array of a decoder. They lack scales of matrices quantised on
    loading."""
    return bool(config.weight_block) or not path.endswith(SCALE)


def _check_arguments(dtype: Any, max_length: int | None) -> tuple[np.dtype | None, int | None]:
    longest = None if max_length is None else whole_number("load_model", "max_length", max_length, most=2**62)
    return None if dtype is None else parameter_dtype(dtype), longest


def model_shapes(config: ModelConfig, dtype: Any = jnp.float32) -> Decoder:
    """Return a model of shapes alone, with their shardings on the current mesh."""
    return jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype))


def _stored_dtype(embed: TensorInFile | None) -> np.dtype:
    """Return the dtype of the embedding table; float32 if there is none or its dtype is not supported, which later
    checks report."""
    return DTYPES.get(embed.kind, DTYPES["F32"]) if embed else DTYPES["F32"]


def parameter_dtype(wanted: Any) -> np.dtype:
    """Return a dtype of parameters, given its name or the dtype. Raises UserError if it is not supported."""
    names = {dtype.name: dtype for dtype in DTYPES.values()}
    name = getattr(wanted, "__name__", None) or getattr(wanted, "name", None) or wanted
    if not isinstance(name, str) or name not in names:
        raise UserError(f"dtype {shown(wanted)} is not supported, only {', '.join(names)}")
    return names[name]


def _stored(model: Path, config: ModelConfig) -> dict[str, TensorInFile]:
    """Return the tensors of a model by their Hugging Face names, without a tied head and rotary frequencies, which are
    redundant."""
    base = base_path(model)
    if is_gguf(base):
        stored = GgufFile.read(base).hugging_face_tensors()
    else:
        stored = FAMILIES[config.model_type].text_tensors(stored_tensors(base))
        if config.weight_block:
            stored = with_scales_by_row(stored)
        used, ignored = ignored_files(base)
        if ignored:
            warn(f"{base}: {used} is read, as in transformers; {', '.join(ignored)} is ignored", stacklevel=4)
    # checked first, since later code makes names for every layer and expert
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
    """Refuse a file whose rotary frequencies differ from the config's: its weights are of another model."""
    # frequencies of "dynamic" depend on the length; older code stored those of "linear" before the division
    scaled = dataclasses.replace(config.rope, length=0)
    accepted = [scaled] + [dataclasses.replace(scaled, type="default")] * (scaled.type == "linear")
    if table.shape == (rotated_dims(config.rope, config.head_dim) // 2,) and table.kind in DTYPES:
        frequencies = table.read().astype(np.float32)
        # float16 has no finer steps for the slowest pairs
        rtol = 1e-3 if table.kind == "F32" else 2**-7
        for rope in accepted:
            if np.allclose(frequencies, inverse_frequencies(rope, config.head_dim), rtol=rtol, atol=6e-8):
                return
    raise UserError(
        f"{model}: {few([table.name])} are not the rotary frequencies of the config (rope_theta, rope_scaling)"
    )


def _check_tensors(
    model: Path, config: ModelConfig, stored: dict[str, TensorInFile], leaves: dict[str, Any]
) -> None:
    """Raise one UserError that says how the tensors differ from the config's."""
    shapes, in_layer = {}, {}
    for path, leaf in leaves.items():
        if path in TOP:
            shapes[TOP[path]] = (config.vocab_size, *leaf.shape[1:]) if leaf.ndim == 2 else leaf.shape
        if path in TOP or not _is_stored(path, config):
            continue
        for part in parts_of(path):
            name, (rows, *columns) = config.layer_names[part], flat_shape(part, config)[::-1]
            for full_name in (names := by_expert(name, config.num_experts)):
                rows_before = in_layer[full_name][0] if full_name in in_layer else 0
                in_layer[full_name] = rows_before + rows, *(size // len(names) for size in columns)
    for layer in range(config.num_layers):
        shapes |= {layer_name(name, layer): shape for name, shape in in_layer.items()}
    unexpected = [tensor.name for name, tensor in stored.items() if name not in shapes]
    pairs = [(stored[name], shape) for name, shape in shapes.items() if name in stored]
    faults = {
        "missing": [name for name in shapes if name not in stored],
        "unexpected": unexpected,
        "misshapen": [f"{t.name} is {t.shape}, expected {shape}" for t, shape in pairs if t.shape != shape],
        "of an unsupported dtype": [
            f"{stored[name].name} is {stored[name].kind}"
            for name in shapes
            if name in stored and stored[name].kind not in ((FLOAT8,) if name + SCALES in shapes else DTYPES)
        ],
    }
    faults = {fault: names for fault, names in faults.items() if names}
    if not faults:
        return
    unreadable = [*unexpected, *faults.get("of an unsupported dtype", [])]
    if not config.num_experts and (kind := kind_of_tensors(unreadable)):
        raise UserError(f"{model}: holds {kind}, expected the plain weights of a {config.model_type} model")
    if faults == {"missing": [TOP["head"]]}:
        raise UserError(
            f"{model}: the output head ({TOP['head']}) is missing, and the config does not say tie_word_embeddings"
        )
    lines = "; ".join(
        f"{fault}: {few(names, 3 if len(faults) < 3 else 2)}" for fault, names in faults.items()
    )
    raise UserError(f"{model}: the weights do not match its config; {lines}")


def _layer_tensors(
    stored: dict[str, TensorInFile], config: ModelConfig, parts: list[str], layer: int
) -> dict[str, TensorInFile]:
    """Return the tensors of a layer's unfused arrays. Each is a whole tensor, or rows of a tensor that holds
    several."""
    tensors, first_rows = {}, dict.fromkeys(config.layer_names.values(), 0)
    for part in parts:
        name = config.layer_names[part]
        if EXPERT in name:
            names = [layer_name(full_name, layer) for full_name in by_expert(name, config.num_experts)]
            tensors[part] = ColumnsOfTensors.of([stored[name] for name in names])
            continue
        tensor, first, rows = stored[layer_name(name, layer)], first_rows[name], flat_shape(part, config)[-1]
        first_rows[name] += rows
        shape = rows, *tensor.shape[1:]
        if tensor.shape != shape:
            tensor = RowsOfTensor(tensor.name, tensor.file, shape, tensor.kind, tensor, first)
        tensors[part] = tensor
    return tensors


def _check_finite(model: Path, dtype: np.dtype, largest: list[tuple[str, Array]]) -> None:
    """Refuse tensors whose largest magnitude is not finite, in float32 or in the model's dtype."""
    magnitudes: list[tuple[str, np.ndarray]] = jax.device_get(largest)
    if broken := list(dict.fromkeys(name for name, x in magnitudes if not np.isfinite(x))):
        raise UserError(f"{model}: NaN or infinite numbers in {few(broken)}")
    with np.errstate(over="ignore"):
        over = list(dict.fromkeys(name for name, x in magnitudes if np.isinf(x.astype(dtype))))
    if over:
        most, wider = float(jnp.finfo(dtype).max), "bfloat16 or float32" if dtype == np.float16 else "float32"
        raise UserError(
            f"{model}: {few(over)} has numbers beyond {most:,.6g}, the largest of {dtype.name}: use {wider}"
        )


@functools.partial(jax.jit, static_argnums=0)
def _zeros(leaves: tuple[tuple[str, jax.ShapeDtypeStruct], ...]) -> Arrays:
    return {path: jnp.zeros(leaf.shape, leaf.dtype, out_sharding=leaf.sharding.spec) for path, leaf in leaves}


def _read_pieces(
    tensor: TensorInFile, mesh: Mesh, axes: Axes, rows: int | None = None, max_bytes: int | None = None
) -> list[Array]:
    """Return a stored tensor in equal pieces [parts, rows of a part, ...], which `_join` puts together.

    The rows are in as many parts as the mesh axis that will split them has devices. The devices along all other axes
    share a part's rows among them, so that one process reads each row once.

    Args:
        rows: pad the tensor with zeros to this number of rows.
        max_bytes: the approximate size of a piece in host memory.
    """
    rows_axis, columns_axis = axes
    parts = axis_size(*names_in(rows_axis))
    part = (rows or tensor.shape[0]) // parts
    shared: tuple[str, ...] = ()
    # with the columns' axis first, only neighbouring devices exchange what they read
    others = [axis for axis in AXES if axis not in names_in(rows_axis)]
    for axis in sorted(others, key=lambda axis: axis not in names_in(columns_axis)):
        if part % axis_size(*shared, axis) == 0:
            shared = (*shared, axis)
    count, row_bytes = 1, tensor.dtype.itemsize * math.prod(tensor.shape[1:])
    while (
        max_bytes
        and parts * part // count * row_bytes > max_bytes
        and part % (2 * count * axis_size(*shared)) == 0
    ):
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
    """Return the tensor that the pieces make, with its rows and columns split over `axes`."""
    rows_axis, columns_axis = axes
    columns = () if pieces[0].ndim == 2 else (columns_axis,)
    others = [axis for axis in AXES if axis not in names_in(*axes)]
    pieces = [reshard(gather(piece, *others), P(rows_axis, None, *columns)) for piece in pieces]
    x = jnp.concatenate(pieces, axis=1)
    return jnp.reshape(x, (-1, *x.shape[2:]), out_sharding=P(rows_axis, *columns))


def _largest(x: Array) -> Float32[Array, ""]:
    """Return the largest magnitude. NaN counts as infinity, since a maximum over devices may lose a NaN."""
    x = x.astype(jnp.float32)
    return jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x)).max()


@functools.partial(jax.jit, static_argnums=(1, 2))
def _place_top(pieces: list[Array], axes: Axes, dtype: np.dtype) -> tuple[tuple[Array, ...], Array]:
    """Return the tensor in the given dtype (with the scales of its rows if that has 8 bits), and its largest magnitude
    before the conversion."""
    x = _join(pieces, axes)
    if dtype not in EIGHT_BITS.values():
        return (x.astype(dtype),), _largest(x)
    values, scale = quantised(x.T, dtype)
    return (values.T, scale[0]), _largest(x)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=3)
def _place_layer(
    layers: Arrays, index: Int[Array, ""], raw: dict[str, list[Array]], config: ModelConfig
) -> tuple[Arrays, Arrays]:
    """Return `layers` with the layer at `index` replaced by the files' values, and the largest magnitude of each
    tensor."""
    parts, axes = {}, {part: split(path, stack) for path, stack in layers.items() for part in parts_of(path)}
    for part, pieces in raw.items():
        parts[part] = _join(pieces, axes[part]).T
    largest = {part: _largest(x) for part, x in parts.items()}
    if config.weights is not None and not config.weight_block:
        kind = EIGHT_BITS[config.weights]
        for part in MATRICES:
            parts[part], parts[part + SCALE] = quantised(parts[part], kind, scale_count(part, config))
    placed = {}
    for path, stack in layers.items():
        layer = fuse(path, {part: parts[part].astype(stack.dtype) for part in parts_of(path)}, config)
        placed[path] = jax.lax.dynamic_update_index_in_dim(stack, layer, index, 0)
    return placed, largest
