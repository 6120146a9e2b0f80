"""Folders that training leaves for use: `gates.safetensors` with the parameters by name, or a head pattern's table, and
a `config.json` that says which method they are for and how they were made. Messages call all of this gates, like the
option that reads it."""

import hashlib
import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file

from kvjax.builtin import GATES, builtin_gates
from kvjax.checkpoints.fingerprint import MadeFor
from kvjax.checkpoints.torch_file import check_finite, is_torch_file
from kvjax.errors import UserError, real_number, shown, whole_number
from kvjax.files import read_text, write_tensors, write_text
from kvjax.mesh import AXES, gather, put, use_mesh
from kvjax.struct import leaves_by_path

WEIGHTS, DESCRIPTION = "gates.safetensors", "config.json"
PUBLISHED = "model.safetensors"
"""The file in place of weights in a folder that authors publish in the form of transformers (KVzap)."""
LARGEST = 16 << 20
"""The most bytes of a description or a head pattern's table."""
MOST = 1 << 20
"""The most layers, heads and widths, so that the shapes that they make are numbers that JAX takes."""
TABLE = "full_attention_heads.tsv"
"""The file in place of weights in a pattern folder (`kvjax.policies.admission.pattern_folder`)."""


def save_exported(folder: str | Path, arrays: dict[str, np.ndarray], description: dict[str, Any]) -> None:
    """Write the weights and their description."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / WEIGHTS, arrays)
    write_text(folder / DESCRIPTION, json.dumps(description, indent=1))


def save_tree(folder: str | Path, tree: Any, description: dict[str, Any]) -> None:
    """Write a pytree of arrays, wherever they are. Call it in every process; the first one writes."""
    whole = gather(tree, *AXES)
    if jax.process_index() == 0:
        arrays = {name: np.asarray(leaf) for name, leaf in leaves_by_path(whole).items()}
        save_exported(folder, arrays, description)


def describe(folder: str | Path) -> dict[str, Any]:
    """Return the object in `config.json`. A folder in the form of transformers names its method as its `model_type`.
    Raises UserError if it cannot be read."""
    found = read_description(exported_files(folder)[1])
    return {"method": found["model_type"]} | found if "model_type" in found else found


def read_description(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises UserError if there is none."""
    text = read_text(file, "gates", most=LARGEST)
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{file}: this describes no gates, or the file is damaged ({error!r})") from None


def read_sizes(description: Mapping[str, Any], kinds: Mapping[str, type]) -> dict[str, Any]:
    """Return the entries of a description that say how large gates are, by their names and kinds.

    Raises:
        KeyError: one is missing.
        UserError: one is of another kind, or a number that no gates have.
    """
    checks: dict[type, Callable[[str, Any], Any]] = {
        int: lambda name, value: whole_number(DESCRIPTION, name, value, most=MOST),
        float: lambda name, value: real_number(DESCRIPTION, name, value, most=float(MOST), above=0.0),
    }
    found = {}
    for name, kind in kinds.items():
        found[name] = checks[kind](name, description[name]) if kind in checks else description[name]
        if not isinstance(found[name], kind):
            raise UserError(f"{DESCRIPTION}: {name} must be {kind.__name__}, got {shown(found[name])}")
    return found


def digest(path: str | Path) -> str:
    """Return a digest of what a folder or a file of the authors' holds. Other weights or another description have
    another one."""
    files = [Path(path)] if is_torch_file(path) else exported_files(path)
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def load_arrays(folder: str | Path) -> dict[str, np.ndarray]:
    """Return the arrays by name. Raises UserError if they cannot be read, or have numbers that are not finite."""
    try:
        arrays = load_file(exported_files(folder)[0])
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{folder}: these are no gates, or the files are damaged ({error!r})") from None
    check_finite(folder, arrays)
    return arrays


def load_tree(folder: str | Path, like: Any) -> Any:
    """Return the pytree that `save_tree` wrote.

    Args:
        like: a pytree of the shapes and dtypes wanted, with shardings (`jax.eval_shape` of what made it).

    Raises:
        UserError: the folder holds other arrays than `like`.
    """
    arrays, wanted = load_arrays(folder), leaves_by_path(like)
    for name in sorted(arrays.keys() | wanted.keys()):
        found, needed = (x[name].shape if name in x else "nothing" for x in (arrays, wanted))
        if found != needed:
            raise UserError(f"{folder}: {name} should be {needed}, found {found}")
    with use_mesh():
        leaves = [put(arrays[name].astype(x.dtype), *_spec(x)) for name, x in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _spec(leaf: Any) -> tuple[Any, ...]:
    return () if leaf.sharding is None else tuple(leaf.sharding.spec)


def sign(folder: str | Path, made_for: MadeFor) -> None:
    """Write into a folder's `config.json` which model it was made for. A folder that has none is left alone."""
    file = Path(folder) / DESCRIPTION
    if file.is_file():
        write_text(file, json.dumps(json.loads(file.read_text()) | made_for.description, indent=1))


def is_exported(folder: str | Path) -> bool:
    """Return True if a folder holds what training exports, or is the name of built-in gates."""
    inside = Path(folder)
    return str(folder) in GATES or ((inside / DESCRIPTION).is_file() and weights_of(inside).is_file())


def weights_of(folder: Path) -> Path:
    """Return the file of a folder that holds what was trained: a pattern's table, or else parameters."""
    return next(
        (folder / name for name in (TABLE, WEIGHTS, PUBLISHED) if (folder / name).is_file()), folder / WEIGHTS
    )


def exported_files(folder: str | Path) -> tuple[Path, Path]:
    """Return the files with the weights and the description. A name in `kvjax.builtin.GATES` stands for those that come
    with kvjax, a training run's folder for those that it exported. Raises UserError if one is missing."""
    folder = builtin_gates(str(folder)) if str(folder) in GATES else of_run(Path(folder))
    files = weights_of(folder), folder / DESCRIPTION
    for file in files:
        if not file.is_file():
            hint = ""
            if (folder / "checkpoints").is_dir():
                hint = f": python -m kvjax.export {shlex.quote(str(folder))} exports a run's last checkpoint"
            raise UserError(f"{folder} holds no gates: it has no {file.name}{hint}")
    return files


def of_run(folder: Path) -> Path:
    """Return the folder that a run exported, if `folder` is a run's; else the folder itself."""
    if weights_of(folder).is_file() or not (folder / "checkpoints").is_dir():
        return folder
    inside = [
        file.parent
        for name in (WEIGHTS, TABLE)
        for file in folder.glob(f"*/{name}")
        if not file.parent.name.startswith(".")
    ]
    return inside[0] if len(inside) == 1 else folder
