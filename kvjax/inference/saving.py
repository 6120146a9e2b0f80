"""Caches on disk: a context's entries, which another process can load on another mesh and with other pages.

A folder has a description (`kvjax.cache.saved`) and its arrays as an Orbax checkpoint. A later save into the same
folder writes its arrays beside the old ones, and the new description then takes the old one's place: a folder is always
whole, whatever stops the writer.
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
    HIDDEN,
    ORIGIN,
    Arrays,
    head_at_place,
    in_order,
    packed,
    place_of_head,
    unpacked,
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
from kvjax.policies.compiled import CompiledPolicy, by_head
from kvjax.policies.eviction.wrapper import metadata_of
from kvjax.policies.policy import Policy
from kvjax.policies.views import Shape
from kvjax.struct import changed, leaves_by_path

OVERHEAD = 16 * 2**20
"""The most bytes of a saved cache's files beyond twice those of its arrays."""
OWN = re.compile(rf"arrays-[0-9a-f]{{8}}.*|{re.escape(DESCRIPTION)}|\.{re.escape(DESCRIPTION)}\.\d+")
"""Names of the files in the folder, including those that a stopped writer left."""


@named_arguments()
def save_cache(path: str | Path, cache: Cache, model: Decoder, policy: Policy | None = None) -> int:
    """Write what a cache holds into a folder, for `load_cache`. What was there before is replaced once all is written.

    Only entries that are stored are written, whatever the pool's size; branches that share pages are written apart.

    Args:
        cache: from `prefill`, or as `stream` yields it.
        model, policy: those that it was made with.

    Returns:
        Bytes of the arrays that were written.

    Raises:
        UserError: a cache of another model or policy, or of branches that a mesh's devices have unequally many of; no
            cache, model, policy or path; a folder with other things in it or that cannot be written, or a disk without
            room; a run of several processes.
    """
    return write_cache(path, cache, model, policy, {})


def write_cache(
    path: str | Path, cache: Cache, model: Decoder, policy: Policy | None, said: dict[str, Any]
) -> int:
    """Do what `save_cache` does, with further entries of the description (`said`)."""
    path = checked_place(path)
    if jax.process_count() > 1:
        raise UserError("save_cache: a cache is saved by one process, this run has several")
    _check_arguments("save_cache", cache, model, policy)
    with use_mesh(model):
        cache, compiled = _saved_as("save_cache", cache, model, policy)
        arrays = packed(cache)
        description = said | _described(cache, model, compiled, arrays)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with locked(path):
            check_room(path, arrays)
            _write(path, arrays, description)
    except OSError as error:
        raise UserError(f"{path}: a cache cannot be written there ({error.strerror or error})") from None
    return description["bytes"]


def checked_place(path: str | Path) -> Path:
    """Return the folder, if it seems that a cache can be saved there. Raises UserError for a folder with other things
    in it, or one that cannot be written."""
    path = _path("save_cache", path)
    try:
        there = [file.name for file in path.iterdir()] if path.is_dir() else []
        taken = path.exists() and not path.is_dir()
        if taken or not all(map(OWN.fullmatch, there)) or (DESCRIPTION in there and not _is_ours(path)):
            raise UserError(f"{path}: it is there and holds no saved cache: name another folder")
        above = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
        if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
            raise UserError(f"{path}: a cache cannot be written there ({above} is no folder to write in)")
    except OSError as error:
        raise UserError(f"{path}: a cache cannot be written there ({error.strerror})") from None
    return path


def _is_ours(path: Path) -> bool:
    """Return True if a folder holds the description of a saved cache."""
    if not (path / DESCRIPTION).is_file():
        return False
    try:
        found = json.loads((path / DESCRIPTION).read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and {"format", "sha256"} <= found.keys()


def _path(where: str, path: Any) -> Path:
    if not isinstance(path, str | Path) or not str(path) or "\0" in str(path):
        raise UserError(f"{where}: path must be a folder's, got {shown(path)}")
    return Path(path)


def _check_arguments(where: str, cache: Any, model: Any, policy: Any) -> None:
    check_arguments(where, model, policy, cache=cache)
    if cache is None:
        raise UserError(f"{where}: cache must come from prefill, got None")


def _saved_as(
    where: str, cache: Cache, model: Decoder, policy: Policy | None
) -> tuple[Cache, CompiledPolicy]:
    """Return the cache as decoding continues it with the policy, and the compiled policy. Refuses what cannot be
    saved."""
    compiled = (policy or Policy()).compile(model)
    if not model.config.num_full_layers:
        raise UserError(
            f"{where}: every layer of this model has a sliding window, beyond which nothing is stored"
        )
    check_in_front(where, cache)
    check_fits(cache, model, compiled)
    caches.free_counts(cache)  # an error for a cache that is not finite
    whole = changed(compiled.decode, eviction=compiled.compact)
    if jax.tree.structure(drop_observation_state(cache, whole)) != jax.tree.structure(cache):
        raise UserError(
            f"{where}: the cache remembers more of its tokens than policy {compiled.host.name} does: give the policy "
            "that it was made with"
        )
    return drop_observation_state(cache, compiled.decode), compiled


def _described(cache: Cache, model: Decoder, policy: CompiledPolicy, arrays: Arrays) -> dict[str, Any]:
    from kvjax import __version__

    held = caches.stats(cache, int((np.asarray(cache.seen) > 0).sum()))
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
        "held": held.entries.sum(1).tolist(),
        "trained": _trained(policy, cache),
        "bytes": sum(x.nbytes for x in arrays.values()),
        "arrays": {name: {"shape": list(x.shape), "dtype": x.dtype.name} for name, x in arrays.items()},
    } | MadeFor.of(model).description


def _trained(policy: CompiledPolicy, cache: Cache) -> dict[str, str]:
    """Return a digest of the gates or scorers of each method that still needs its memories of a cache's tokens; all
    methods without gates have the same digest."""
    host, state = policy.host, cache.layers.state
    admission, eviction = host.admission, host.eviction if host.compacts_answers else None
    held: dict[str, tuple[Any, Any]] = {
        "admission": (admission, (state.admission, dict(admission.metadata), host.max_entries))
    }
    if eviction is not None:
        held["eviction"] = eviction, (state.eviction, dict(metadata_of(eviction)), cache.observations)
    found = {}
    for role, (method, memories) in held.items():
        if jax.tree.leaves(memories):
            known = hashlib.sha256()
            while isinstance(method, Method):
                for name, leaf in leaves_by_path(getattr(method, method.trained, ())).items():
                    x = np.asarray(leaf)
                    if by_head(leaf):
                        x = in_order(x, place_of_head(cache), 0, 1)
                    known.update(repr((name, x.shape, x.dtype.name)).encode() + x.tobytes())
                method = getattr(method, "eviction", None)  # within a wrapper
            found[role] = known.hexdigest()[:16]
    return found


def _digests(folder: Path) -> dict[str, str]:
    """Return a digest of each file below a folder, by its path in it."""
    return {file.relative_to(folder).as_posix(): _digest(file) for file in _files(folder)}


def _files(folder: Path) -> list[Path]:
    """Return the files below a folder. Raises UserError for a link, and for anything else that is no plain file."""
    found = []
    for at in (folder, *sorted(folder.rglob("*"))):
        mode = at.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise UserError(f"{at}: damaged, it is no plain file")
        found += [at] if stat.S_ISREG(mode) else []
    return found


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
        for own in path.glob(f"{folder.name}*"):
            shutil.rmtree(own, ignore_errors=True)
        if isinstance(error, ValueError) and not isinstance(error, UserError):
            # TensorStore's, of a disk that fills meanwhile, or a file that grows too large
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
        policy: the one that it was made with, or another one that needs to know no more of its tokens.
        page_size: tokens per page; None: as it was.
        capacity: as in `prefill`; None: the pool is as large as what is stored takes, and grows.

    Raises:
        UserError: no whole saved cache, or one of another model, policy or dtype, or with numbers that other gates or
            scorers computed.
        CapacityError: a capacity that is too small for it, or more memory than the devices have free.
    """
    return read_cache(path, model, policy, page_size, capacity)[0]


def read_cache(
    path: str | Path,
    model: Decoder,
    policy: Policy | None,
    page_size: int | None = None,
    capacity: int | str | None = None,
) -> tuple[Cache, dict[str, Any]]:
    """Return what `load_cache` returns, and the description."""
    path = _path("load_cache", path)
    check_arguments("load_cache", model, policy)
    page_size = None if page_size is None else whole_number("load_cache", "page_size", page_size)
    with use_mesh(model):
        compiled = (policy or Policy()).compile(model)
        try:
            if not path.is_dir():
                raise UserError(f"{path}: no cache is saved here")
            with locked(path):
                found = describe_cache(path)
                _check(path, found, model, compiled.host)
                wanted = _wanted(path, found, model, compiled)
                arrays = _read(path, found, wanted)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
        check_lengths(path, found, arrays)
        check_numbers(path, arrays, found["window"])
        size = found["page_size"] if page_size is None else page_size
        size = page_size_of(compiled.host, size, int8=model.config.int8_entries)
        like = _like(path, found, model, compiled, arrays, size, capacity)
        return unpacked(like, arrays), found


def _check(path: Path, found: Mapping[str, Any], model: Decoder, policy: Policy) -> None:
    """Refuse a cache of other weights, another dtype or another window."""
    # first, since the digest of weights depends on their dtype
    if found["dtype"] != (dtype := np.dtype(model.dtype).name):
        raise UserError(f"{path}: saved in {found['dtype']}, the model is in {dtype}")
    saved = "int8" if caches.SCALE in found["metadata"] else None
    if saved != (own := model.config.kv_cache_dtype):
        raise UserError(f"{path}: saved with kv_cache_dtype {saved}, the model is loaded with {own}")
    if found["contents"] != contents(model):
        made_for = MadeFor.described(found)
        of = "other weights" if made_for is None else f"the model {made_for.model}"
        raise UserError(f"{path}: saved of {of}, whose weights are not those of {model_name(model)}")
    if found["window"] != policy.window:
        raise UserError(
            f"{path}: the cache has window {found['window']}, policy {policy.name} has {policy.window}"
        )


def _wanted(
    path: Path, found: Mapping[str, Any], model: Decoder, policy: CompiledPolicy
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the arrays that a description must name, given the model and the policy. Raises UserError if it names
    others."""
    config, dtype = model.config, np.dtype(model.dtype)
    sizes = len(found["held"]), len(found["held"][0]), found["arrays"]["entries"]["shape"][-1]
    if sizes != (config.num_full_layers, config.num_kv_heads, 2 * config.head_dim):
        raise UserError(f"{path / DESCRIPTION}: damaged (layers, heads and width are {sizes})")
    known = {**policy.host.metadata, **caches.MAX_ENTRIES_METADATA, caches.SCALE: "int32"}
    if wrong := [x for x, own in found["metadata"].items() if np.dtype(known.get(x, own)).name != own]:
        raise UserError(
            f"{path / DESCRIPTION}: damaged (metadata {wrong[0]} is {found['metadata'][wrong[0]]})"
        )
    wanted = {name: jax.ShapeDtypeStruct(*x) for name, x in described_arrays(found).items()}
    metadata = set(found["metadata"]) - {caches.PRIORITY}
    # older files have no positions of the local window's tokens
    metadata -= {caches.POSITION} - {x.removeprefix("numbers.") for x in found["arrays"]}
    for name in metadata:
        wanted[f"numbers.{name}"] = jax.ShapeDtypeStruct(wanted["priority"].shape, found["metadata"][name])
    shape = Shape(
        len(found["tokens"]),
        config.num_kv_heads,
        config.num_heads // config.num_kv_heads,
        config.head_dim,
        dtype,
    )
    states, observations = policy.decode.memory_shapes(shape, config.num_full_layers)
    memories = leaves_by_path({"state": states, "observations": observations})
    if {x for x in found["arrays"] if x.startswith(("state", "observations"))} != set(memories):
        raise UserError(
            f"{path}: saved with policy {found['policy']}, which does not know what policy {policy.host.name} needs to "
            "know of its tokens"
        )
    if config.sliding_layers:
        slots = slots_for(config.sliding_window, caches.table_tokens(max(found["tokens"])))
        shape = (
            len(config.sliding_layers),
            len(found["tokens"]),
            config.num_kv_heads,
            slots,
            2 * config.head_dim,
        )
        wanted["sliding"] = jax.ShapeDtypeStruct(shape, dtype)
        if HIDDEN in found["arrays"] and caches.POSITION in found["metadata"]:
            wanted[HIDDEN] = jax.ShapeDtypeStruct((len(found["tokens"]), slots), np.bool_)
    wanted |= memories
    own = {name: (tuple(x["shape"]), x["dtype"]) for name, x in found["arrays"].items()}
    needed = {name: (x.shape, np.dtype(x.dtype).name) for name, x in wanted.items()}
    for name in sorted(own | needed):
        if own.get(name) != needed.get(name):
            raise UserError(
                f"{path / DESCRIPTION}: damaged (array {shown(name)} is {own.get(name)}, expected {needed.get(name)})"
            )
    return wanted


def _read(path: Path, found: Mapping[str, Any], wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Arrays:
    """Return the arrays as they were written. Raises UserError unless the files are as they were written."""
    free = caches.device_bytes(free=True) * axis_size(*SHARDS)
    if found["bytes"] > free:
        raise CapacityError(
            f"{path}: the cache that is saved here takes {found['bytes'] / 2**20:.1f} MiB on devices that have "
            f"{free / 2**20:.1f} MiB free"
        )
    folder = path / found["folder"]
    # before Orbax reads any, since its threads outlive the errors that they raise
    size = sum(file.stat().st_size for file in _files(folder)) if folder.is_dir() else 0
    if size > 2 * found["bytes"] + OVERHEAD:
        raise UserError(f"{folder}: damaged, its files have {size} bytes for arrays of {found['bytes']}")
    if (there := _digests(folder) if folder.is_dir() else {}) != found["files"]:
        name, _ = min(there.items() ^ found["files"].items())
        raise UserError(f"{folder / name}: damaged, it is not as it was written")
    arrays = {name: np.zeros(x.shape, x.dtype) for name, x in wanted.items()}
    like = {name: x for name, x in arrays.items() if x.size}
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            read = checkpointer.restore(folder.absolute(), like)
    except Exception as error:  # Orbax's and TensorStore's, of any kind
        raise UserError(f"{folder}: damaged ({str(error)[:200]})") from None
    arrays |= {name: np.asarray(read[name]) for name in like}
    for name, x in arrays.items():
        if (x.shape, x.dtype) != (wanted[name].shape, wanted[name].dtype):
            raise UserError(f"{folder}: damaged, array {name} is {x.dtype} of shape {x.shape}")
    return arrays


def _like(
    path: Path,
    found: Mapping[str, Any],
    model: Decoder,
    policy: CompiledPolicy,
    arrays: Arrays,
    page_size: int,
    capacity: int | str | None,
) -> Cache:
    """Return the shapes of the cache on the current mesh."""
    config, seen, length, shards = model.config, arrays["seen"], arrays["length"], batch_shards()
    batch, window = -(-len(seen) // shards) * shards, found["window"]
    dtype = np.dtype(model.dtype)
    stored, bounds = stored_as(dtype)
    metadata = {name: np.dtype(own) for name, own in found["metadata"].items() if name != caches.SCALE}
    entry = caches.entry_bytes(config.head_dim, dtype, int8=config.int8_entries)
    page_bytes = page_size * (entry + sum(x.itemsize for x in metadata.values()))
    page_bytes += 2 * config.head_dim * bounds.itemsize * found["selects"]
    padded = np.pad(seen, (0, batch - len(seen)))
    rows = np.pad(length, ((0, 0), (0, batch - len(seen)), (0, 0)))
    rows = in_order(rows, head_at_place(config), 0, 2)
    counted = np.pad(counted_tokens(found), (0, batch - len(seen)))
    used = int(caches.shard_pages(rows, counted, window, page_size).max())
    pages, limit = caches.pool_size(used, page_bytes), None
    if capacity is not None:
        local = rows.size // axis_size(*SHARDS)
        limit = caches.capacity_pages(capacity, local, page_size, page_bytes)
        if limit < used:
            raise CapacityError(
                f"capacity {capacity}: {limit} pages of {page_size} tokens a device, the cache saved in {path} takes "
                f"{used}"
            )
        pages = min(pages, limit)
    windows = (
        len(config.sliding_layers)
        * batch
        * config.num_kv_heads
        * slots_for(config.sliding_window, caches.table_tokens(int(seen.max())))
    )
    size = pages * page_bytes + windows * 2 * config.head_dim * dtype.itemsize // axis_size(*SHARDS)
    if size > (free := caches.device_bytes(free=True)):
        raise CapacityError(
            f"{path}: the cache that is saved here takes {size / 2**20:.1f} MiB on a device that has "
            f"{free / 2**20:.1f} MiB free"
        )
    tokens, most = caches.table_tokens(int(seen.max())), policy.host.max_entries
    layout = Layout(
        **sizes_of(config), batch=batch, window=window,
        tokens=tokens if most is None else max(min(tokens, most + window - 1), int(length.max()) + window - 1),
        page_size=page_size, pages=pages, dtype=dtype, stored=stored, bounds=bounds if found["selects"] else None,
        metadata=tuple(metadata.items()), limit=limit, sliding_slots=slots_for(config.sliding_window, tokens),
        masks_windows=policy.host.positions or HIDDEN in found["arrays"],
    )  # fmt: skip
    group = config.num_heads // config.num_kv_heads
    like = jax.eval_shape(lambda: laid_out(policy.decode, layout, group))
    check_fits(changed(like, seen=padded), model, policy)
    for role, own in _trained(policy, like).items():
        # older files do not say
        if found.get("trained", {role: own}).get(role) != own:
            raise UserError(
                f"{path}: what is saved of its tokens was made by other gates or scorers than those of policy "
                f"{policy.host.name}, which would go on with it"
            )
    return like
