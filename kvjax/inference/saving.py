"""Caches on disk: a context's entries, which another process can load on another mesh and with other pages.

A folder has a description (`kvjax.cache.saved`) and the arrays as an Orbax checkpoint. A later save into the same
folder writes its arrays next to the old ones, and then replaces the description. A folder is therefore always complete,
even if the writer is stopped.
"""

import hashlib
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from kvjax import cache as caches
from kvjax.cache import Cache, CapacityError, Layout
from kvjax.cache.packed_entries import (
    DROPPED_SLOTS,
    ORIGIN,
    Arrays,
    head_at_place,
    packed,
    place_of_head,
    unpacked,
    with_heads_in_order,
)
from kvjax.cache.saved import (
    DESCRIPTION,
    FORMAT,
    check_lengths,
    check_numbers,
    counted_tokens,
    describe_cache,
    described_arrays,
    digest_of,
)
from kvjax.cache.sliding import slots_for
from kvjax.checkpoints.fingerprint import MadeFor, contents, model_name
from kvjax.checkpoints.orbax import check_room, export
from kvjax.errors import UserError, named_arguments, shown, whole_number
from kvjax.files import locked, write_text
from kvjax.inference.allocation import laid_out, page_size_of, sizes_of, stored_as
from kvjax.inference.checks import check_arguments, check_fits, check_in_front
from kvjax.inference.forward import drop_observation_state
from kvjax.mesh import SHARDS, axis_size, batch_shards, use_mesh
from kvjax.models.decoder import Decoder
from kvjax.policies.base import Method
from kvjax.policies.compiled import CompiledPolicy, is_split_by_head
from kvjax.policies.eviction.wrapper import metadata_of
from kvjax.policies.policy import Policy
from kvjax.policies.views import Shape
from kvjax.struct import changed, leaves_by_path

OVERHEAD = 16 * 2**20
"""The most bytes that a saved cache's files may have beyond twice the bytes of its arrays."""
SAVED_FILES = re.compile(
    rf"arrays-[0-9a-f]{{8}}.*|{re.escape(DESCRIPTION)}|\.{re.escape(DESCRIPTION)}\.[0-9a-f]{{8}}"
)
"""Names of the files in the folder, including those that a stopped writer left."""


@named_arguments()
def save_cache(path: str | Path, cache: Cache, model: Decoder, policy: Policy | None = None) -> int:
    """Write a cache into a folder, for `load_cache`. A cache that was saved there before is replaced once all is
    written.

    Only stored entries are written, whatever the pool's size. Pages that forks share are written once for each fork.

    Args:
        cache: from `prefill`, or as `stream` yields it.
        model, policy: the model and the policy that the cache was made with.

    Returns:
        The bytes of the arrays that were written.

    Raises:
        UserError: the cache is of another model or policy, or holds forks that are unequally spread over the mesh's
            devices; an argument is not a cache, model, policy or path; the folder holds other files or cannot be
            written, or the disk is full; the run has several processes.
    """
    return write_cache(path, cache, model, policy, {})


def write_cache(
    path: str | Path, cache: Cache, model: Decoder, policy: Policy | None, extra: dict[str, Any]
) -> int:
    """Do what `save_cache` does, with `extra` fields in the description."""
    path = checked_place(path)
    if jax.process_count() > 1:
        raise UserError("save_cache: a cache is saved by one process, this run has several")
    _check_arguments("save_cache", cache, model, policy)
    with use_mesh(model):
        cache, compiled = _saved_as("save_cache", cache, model, policy)
        arrays = packed(cache)
        description = extra | _described(cache, model, compiled, arrays)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with locked(path):
            check_room(path, arrays)
            _write(path, arrays, description)
    except OSError as error:
        raise UserError(f"{path}: a cache cannot be written there ({error.strerror or error})") from None
    return description["bytes"]


def checked_place(path: str | Path) -> Path:
    """Return the folder if a cache can be saved there, as far as that is known before writing. Raises UserError for a
    folder that holds other files or cannot be written."""
    path = _path("save_cache", path)
    try:
        names = [file.name for file in path.iterdir()] if path.is_dir() else []
        is_file = path.exists() and not path.is_dir()
        if (
            is_file
            or not all(map(SAVED_FILES.fullmatch, names))
            or (DESCRIPTION in names and not _is_ours(path))
        ):
            raise UserError(f"{path}: it exists and holds no saved cache: name another folder")
        parent = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
        if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
            raise UserError(f"{path}: a cache cannot be written there ({parent} is not a writable folder)")
    except OSError as error:
        raise UserError(f"{path}: a cache cannot be written there ({error.strerror})") from None
    return path


def _is_ours(path: Path) -> bool:
    """Return True if a folder holds the description of a saved cache."""
    if not (path / DESCRIPTION).is_file():
        return False
    try:
        description = json.loads((path / DESCRIPTION).read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return False
    return isinstance(description, dict) and {"format", "sha256"} <= description.keys()


def _path(where: str, path: Any) -> Path:
    if not isinstance(path, str | Path) or not str(path) or "\0" in str(path):
        raise UserError(f"{where}: path must be that of a folder, got {shown(path)}")
    return Path(path)


def _check_arguments(where: str, cache: Any, model: Any, policy: Any) -> None:
    check_arguments(where, model, policy, cache=cache)
    if cache is None:
        raise UserError(f"{where}: cache must come from prefill, got None")


def _saved_as(
    where: str, cache: Cache, model: Decoder, policy: Policy | None
) -> tuple[Cache, CompiledPolicy]:
    """Return the cache in the form in which decoding continues it, and the compiled policy. Refuses a cache that cannot
    be saved."""
    compiled = (policy or Policy()).compile(model)
    if not model.config.num_full_layers:
        raise UserError(
            f"{where}: every layer of this model has a sliding window, beyond which nothing is stored"
        )
    check_in_front(where, cache)
    check_fits(cache, model, compiled)
    caches.free_counts(cache)  # raises if a number is not finite
    all_memories = changed(compiled.decode, eviction=compiled.compact)
    if jax.tree.structure(drop_observation_state(cache, all_memories)) != jax.tree.structure(cache):
        raise UserError(
            f"{where}: the cache remembers more of its tokens than policy {compiled.host.name} does: give the policy "
            "that it was made with"
        )
    return drop_observation_state(cache, compiled.decode), compiled


def _described(cache: Cache, model: Decoder, policy: CompiledPolicy, arrays: Arrays) -> dict[str, Any]:
    from kvjax import __version__

    stats = caches.stats(cache, int((np.asarray(cache.seen) > 0).sum()))
    return {
        "format": FORMAT,
        "kvjax": __version__,
        "contents": contents(model),
        "policy": policy.host.name,
        "window": cache.window,
        "page_size": cache.page_size,
        "dtype": np.dtype(cache.pages.dtype).name,
        "selects": cache.pages.bounds is not None,
        "metadata": {
            name: x.dtype.name for name, x in cache.pages.metadata.items() if f"metadata.{name}" in arrays
        },
        "tokens": arrays["seen"].tolist(),
        "origin": arrays[ORIGIN].tolist() if ORIGIN in arrays else None,
        "held": stats.entries.sum(1).tolist(),
        "trained": _trained(policy, cache),
        "bytes": sum(x.nbytes for x in arrays.values()),
        "arrays": {name: {"shape": list(x.shape), "dtype": x.dtype.name} for name, x in arrays.items()},
    } | MadeFor.of(model).description


def _trained(policy: CompiledPolicy, cache: Cache) -> dict[str, str]:
    """Return a digest of the gates or scorers of each method that still needs its memories of a cache's tokens. All
    methods without gates have the same digest."""
    host, state = policy.host, cache.layers.state
    admission, eviction = host.admission, host.eviction if host.compacts_answers else None
    methods: dict[str, tuple[Any, Any]] = {
        "admission": (admission, (state.admission, dict(admission.metadata), host.max_entries))
    }
    if eviction is not None:
        methods["eviction"] = eviction, (state.eviction, dict(metadata_of(eviction)), cache.observations)
    digests = {}
    for role, (method, memories) in methods.items():
        if jax.tree.leaves(memories):
            digest = hashlib.sha256()
            while isinstance(method, Method):
                for name, leaf in leaves_by_path(getattr(method, method.trained, ())).items():
                    array = np.asarray(leaf)
                    if is_split_by_head(leaf):
                        array = with_heads_in_order(array, place_of_head(cache), 0, 1)
                    digest.update(repr((name, array.shape, array.dtype.name)).encode() + array.tobytes())
                method = getattr(method, "eviction", None)  # within a wrapper
            digests[role] = digest.hexdigest()[:16]
    return digests


def _digests(folder: Path) -> dict[str, str]:
    """Return a digest of each file below a folder, by its path in it."""
    return {file.relative_to(folder).as_posix(): _digest(file) for file in _files(folder)}


def _files(folder: Path) -> list[Path]:
    """Return the files below a folder. Raises UserError for links and everything else that is not a plain file."""
    files = []
    for path in (folder, *sorted(folder.rglob("*"))):
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise UserError(f"{path}: damaged, it is not a plain file")
        files += [path] if stat.S_ISREG(mode) else []
    return files


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _write(path: Path, arrays: Arrays, description: dict[str, Any]) -> None:
    folder = path / f"arrays-{uuid.uuid4().hex[:8]}"
    try:
        # Orbax takes no empty arrays
        export(folder, {name: x for name, x in arrays.items() if x.size})
        description = description | {"folder": folder.name, "files": _digests(folder)}
        write_text(path / DESCRIPTION, json.dumps(description | {"sha256": digest_of(description)}, indent=1))
    except BaseException as error:
        for leftover in path.glob(f"{folder.name}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        if isinstance(error, ValueError) and not isinstance(error, UserError):
            # TensorStore raises it if the disk fills or a file grows too large
            code = re.search(r"os_error_code='(\d+)'", str(error))
            raise OSError(os.strerror(int(code[1])) if code else str(error)[:200]) from None
        raise
    for old in path.glob("arrays-*"):
        if old != folder:
            shutil.rmtree(old, ignore_errors=True)


@named_arguments()
def load_cache(
    path: str | Path,
    model: Decoder,
    policy: Policy | None = None,
    *,
    page_size: int | None = None,
    capacity: int | str | None = None,
) -> Cache:
    """Return a cache that `save_cache` wrote, on the model's mesh, to be continued where it ended.

    Args:
        policy: the policy that the cache was made with, or one that does not need to know more of its tokens.
        page_size: tokens per page; None: as before.
        capacity: as in `prefill`; None: the pool is as large as the stored entries need, and grows.

    Raises:
        UserError: there is no complete saved cache, or it is of another model, policy or dtype, or its numbers were
            computed by other gates or scorers.
        CapacityError: the capacity is too small for the cache, or the devices have too little free memory.
    """
    return read_cache(path, model, policy, page_size, capacity)[0]


def read_cache(
    path: str | Path,
    model: Decoder,
    policy: Policy | None,
    page_size: int | None = None,
    capacity: int | str | None = None,
) -> tuple[Cache, dict[str, Any]]:
    """Return the cache of `load_cache`, and its description."""
    path = _path("load_cache", path)
    check_arguments("load_cache", model, policy)
    page_size = None if page_size is None else whole_number("load_cache", "page_size", page_size)
    with use_mesh(model):
        compiled = (policy or Policy()).compile(model)
        try:
            if not path.is_dir():
                raise UserError(f"{path}: no cache is saved here")
            with locked(path):
                description = describe_cache(path)
                _check(path, description, model, compiled.host)
                wanted = _wanted(path, description, model, compiled)
                arrays = _read(path, description, wanted)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
        check_lengths(path, description, arrays)
        check_numbers(path, arrays, description["window"])
        size = description["page_size"] if page_size is None else page_size
        size = page_size_of(compiled.host, size, int8=model.config.int8_entries)
        like = _template(path, description, model, compiled, arrays, size, capacity)
        return unpacked(like, arrays), description


def _check(path: Path, description: Mapping[str, Any], model: Decoder, policy: Policy) -> None:
    """Refuse a cache of other weights, another dtype or another window."""
    # check the dtype first, since the digest of weights depends on it
    if description["dtype"] != (dtype := np.dtype(model.dtype).name):
        raise UserError(f"{path}: saved in {description['dtype']}, the model is in {dtype}")
    saved = "int8" if caches.SCALE in description["metadata"] else None
    if saved != (kv_cache_dtype := model.config.kv_cache_dtype):
        raise UserError(
            f"{path}: saved with kv_cache_dtype {saved}, the model is loaded with {kv_cache_dtype}"
        )
    if description["contents"] != contents(model):
        made_for = MadeFor.described(description)
        source = "other weights" if made_for is None else f"the model {made_for.model}"
        raise UserError(f"{path}: saved with {source}, whose weights are not those of {model_name(model)}")
    if description["window"] != policy.window:
        raise UserError(
            f"{path}: the cache has window {description['window']}, policy {policy.name} has {policy.window}"
        )


def _wanted(
    path: Path, description: Mapping[str, Any], model: Decoder, policy: CompiledPolicy
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of the arrays that a description must name, given the model and the policy. Raises UserError if
    it names others."""
    config, dtype = model.config, np.dtype(model.dtype)
    sizes = (
        len(description["held"]),
        len(description["held"][0]),
        description["arrays"]["entries"]["shape"][-1],
    )
    if sizes != (config.num_full_layers, config.num_kv_heads, 2 * config.head_dim):
        raise UserError(f"{path / DESCRIPTION}: damaged (layers, heads and width are {sizes})")
    dtypes = {**policy.host.metadata, **caches.MAX_ENTRIES_METADATA, caches.SCALE: "int32"}
    for name, saved in description["metadata"].items():
        if np.dtype(dtypes.get(name, saved)).name != saved:
            raise UserError(f"{path / DESCRIPTION}: damaged (metadata {name} is {saved})")
    wanted = {name: jax.ShapeDtypeStruct(*x) for name, x in described_arrays(description).items()}
    metadata = set(description["metadata"]) - {caches.PRIORITY}
    # older files have no positions of the local window's tokens
    metadata -= {caches.POSITION} - {x.removeprefix("numbers.") for x in description["arrays"]}
    for name in metadata:
        wanted[f"numbers.{name}"] = jax.ShapeDtypeStruct(
            wanted["priority"].shape, description["metadata"][name]
        )
    sequences, group = len(description["tokens"]), config.num_heads // config.num_kv_heads
    shape = Shape(sequences, config.num_kv_heads, group, config.head_dim, dtype)
    states, observations = policy.decode.memory_shapes(shape, config.num_full_layers)
    memories = leaves_by_path({"state": states, "observations": observations})
    if {x for x in description["arrays"] if x.startswith(("state", "observations"))} != set(memories):
        raise UserError(
            f"{path}: saved with policy {description['policy']}, which does not know what policy {policy.host.name} "
            "needs to know of its tokens"
        )
    if config.sliding_layers:
        slots = slots_for(config.sliding_window, caches.table_tokens(max(description["tokens"])))
        shape = len(config.sliding_layers), sequences, config.num_kv_heads, slots, 2 * config.head_dim
        wanted["sliding"] = jax.ShapeDtypeStruct(shape, dtype)
        if DROPPED_SLOTS in description["arrays"] and caches.POSITION in description["metadata"]:
            wanted[DROPPED_SLOTS] = jax.ShapeDtypeStruct((sequences, slots), np.bool_)
    wanted |= memories
    described = {name: (tuple(x["shape"]), x["dtype"]) for name, x in description["arrays"].items()}
    expected = {name: (x.shape, np.dtype(x.dtype).name) for name, x in wanted.items()}
    for name in sorted(described | expected):
        if described.get(name) != expected.get(name):
            raise UserError(
                f"{path / DESCRIPTION}: damaged (array {shown(name)} is {described.get(name)}, expected "
                f"{expected.get(name)})"
            )
    return wanted


def _read(path: Path, description: Mapping[str, Any], wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Arrays:
    """Return the saved arrays. Raises UserError if the files were changed."""
    free = caches.device_bytes(free=True) * axis_size(*SHARDS)
    if description["bytes"] > free:
        raise CapacityError(
            f"{path}: the cache that is saved here takes {description['bytes'] / 2**20:.1f} MiB on devices that have "
            f"{free / 2**20:.1f} MiB free"
        )
    folder = path / description["folder"]
    # check before Orbax reads any file, since its threads outlive the errors that they raise
    size = sum(file.stat().st_size for file in _files(folder)) if folder.is_dir() else 0
    if size > 2 * description["bytes"] + OVERHEAD:
        raise UserError(
            f"{folder}: damaged, its files have {size} bytes for arrays of {description['bytes']}"
        )
    if (digests := _digests(folder) if folder.is_dir() else {}) != description["files"]:
        name, _ = min(digests.items() ^ description["files"].items())
        raise UserError(f"{folder / name}: damaged, it was changed since it was written")
    arrays = {name: np.zeros(x.shape, x.dtype) for name, x in wanted.items()}
    like = {name: x for name, x in arrays.items() if x.size}
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            read = checkpointer.restore(folder.absolute(), like)
    except Exception as error:  # Orbax and TensorStore raise many kinds
        raise UserError(f"{folder}: damaged ({str(error)[:200]})") from None
    arrays |= {name: np.asarray(read[name]) for name in like}
    for name, x in arrays.items():
        if (x.shape, x.dtype) != (wanted[name].shape, wanted[name].dtype):
            raise UserError(f"{folder}: damaged, array {name} is {x.dtype} of shape {x.shape}")
    return arrays


def _template(
    path: Path,
    description: Mapping[str, Any],
    model: Decoder,
    policy: CompiledPolicy,
    arrays: Arrays,
    page_size: int,
    capacity: int | str | None,
) -> Cache:
    """Return the shapes, dtypes and shardings of the cache on the current mesh."""
    config, seen, length, shards = model.config, arrays["seen"], arrays["length"], batch_shards()
    batch, window = -(-len(seen) // shards) * shards, description["window"]
    dtype = np.dtype(model.dtype)
    stored, bounds = stored_as(dtype)
    metadata = {name: np.dtype(x) for name, x in description["metadata"].items() if name != caches.SCALE}
    entry_bytes = caches.entry_bytes(config.head_dim, dtype, int8=config.int8_entries)
    page_bytes = page_size * (entry_bytes + sum(x.itemsize for x in metadata.values()))
    page_bytes += 2 * config.head_dim * bounds.itemsize * description["selects"]
    padded = np.pad(seen, (0, batch - len(seen)))
    lengths = np.pad(length, ((0, 0), (0, batch - len(seen)), (0, 0)))
    lengths = with_heads_in_order(lengths, head_at_place(config), 0, 2)
    counted = np.pad(counted_tokens(description), (0, batch - len(seen)))
    used = int(caches.shard_pages(lengths, counted, window, page_size).max())
    pages, limit = caches.pool_size(used, page_bytes), None
    if capacity is not None:
        head_caches = lengths.size // axis_size(*SHARDS)
        limit = caches.capacity_pages(capacity, head_caches, page_size, page_bytes)
        if limit < used:
            raise CapacityError(
                f"capacity {capacity}: {limit} pages of {page_size} tokens a device, the cache saved in {path} takes "
                f"{used}"
            )
        pages = min(pages, limit)
    tokens, max_entries = caches.table_tokens(int(seen.max())), policy.host.max_entries
    slots = slots_for(config.sliding_window, tokens)
    window_entries = len(config.sliding_layers) * batch * config.num_kv_heads * slots
    size = pages * page_bytes + window_entries * 2 * config.head_dim * dtype.itemsize // axis_size(*SHARDS)
    if size > (free := caches.device_bytes(free=True)):
        raise CapacityError(
            f"{path}: the cache that is saved here takes {size / 2**20:.1f} MiB on a device that has "
            f"{free / 2**20:.1f} MiB free"
        )
    if max_entries is not None:
        tokens = max(min(tokens, max_entries + window - 1), int(length.max()) + window - 1)
    layout = Layout(
        **sizes_of(config), batch=batch, window=window, tokens=tokens, page_size=page_size, pages=pages, dtype=dtype,
        stored=stored, bounds=bounds if description["selects"] else None, metadata=tuple(metadata.items()), limit=limit,
        sliding_slots=slots,
        masks_windows=policy.host.positions or DROPPED_SLOTS in description["arrays"],
    )  # fmt: skip
    group = config.num_heads // config.num_kv_heads
    like = jax.eval_shape(lambda: laid_out(policy.decode, layout, group))
    check_fits(changed(like, seen=padded), model, policy)
    for role, digest in _trained(policy, like).items():
        # older files have no digests
        if description.get("trained", {role: digest}).get(role) != digest:
            raise UserError(
                f"{path}: the saved memories were computed by other gates or scorers than those of policy "
                f"{policy.host.name}"
            )
    return like
