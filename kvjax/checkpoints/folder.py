"""Folders that training exports. They hold `gates.safetensors` with the parameters by name (or a head pattern's table),
and a `config.json` with the method and how they were made. Messages call all of them gates, like the option."""

import contextlib
import hashlib
import json
import shlex
from collections.abc import Callable, Iterator, Mapping
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
"""The file with weights in a folder that authors publish in transformers' format (KVzap)."""
LARGEST = 16 << 20
"""The maximum bytes of a description or of a head pattern's table."""
LARGEST_SIZE = 1 << 20
"""The maximum of each size of gates (layers, heads, widths), so that JAX accepts the resulting shapes."""
TABLE = "full_attention_heads.tsv"
"""The file with the head pattern in a pattern folder (`kvjax.policies.admission.pattern_folder`)."""


def save_exported(folder: str | Path, arrays: dict[str, np.ndarray], description: dict[str, Any]) -> None:
    """Write the weights and their description."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / WEIGHTS, arrays)
    write_text(folder / DESCRIPTION, json.dumps(description, indent=1))


def save_tree(folder: str | Path, tree: Any, description: dict[str, Any]) -> None:
    """Write a pytree of arrays on any devices. Call it in every process; the first one writes."""
    gathered = gather(tree, *AXES)
    if jax.process_index() == 0:
        arrays = {name: np.asarray(leaf) for name, leaf in leaves_by_path(gathered).items()}
        save_exported(folder, arrays, description)


def describe(folder: str | Path) -> dict[str, Any]:
    """Return the object in `config.json`. In a folder in transformers' format, the `model_type` is the method. Raises
    UserError if it cannot be read."""
    description = read_description(exported_files(folder)[1])
    return {"method": description["model_type"]} | description if "model_type" in description else description


def read_description(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises UserError if there is none."""
    text = read_text(file, "gates", most=LARGEST)
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{file}: this describes no gates, or the file is damaged ({error!r})") from None


@contextlib.contextmanager
def readable_as(kind: str, folder: str | Path) -> Iterator[None]:
    """Turn any error of a block, which reads a folder's description or arrays, into a UserError.

    Args:
        kind: what the folder should hold, in the plural.
    """
    try:
        yield
    except Exception as error:
        raise UserError(f"{folder}: these are no {kind}, or the files are damaged ({error!r})") from None


def read_sizes(description: Mapping[str, Any], kinds: Mapping[str, type]) -> dict[str, Any]:
    """Return the entries of a description with the sizes of gates, given their names and types.

    Raises:
        KeyError: an entry is missing.
        UserError: an entry has another type or is out of range.
    """
    checks: dict[type, Callable[[str, Any], Any]] = {
        int: lambda name, value: whole_number(DESCRIPTION, name, value, most=LARGEST_SIZE),
        float: lambda name, value: real_number(DESCRIPTION, name, value, most=float(LARGEST_SIZE), above=0.0),
    }
    sizes = {}
    for name, kind in kinds.items():
        sizes[name] = checks[kind](name, description[name]) if kind in checks else description[name]
        if not isinstance(sizes[name], kind):
            raise UserError(f"{DESCRIPTION}: {name} must be {kind.__name__}, got {shown(sizes[name])}")
    return sizes


def digest(path: str | Path) -> str:
    """Return a digest of the weights and the description in a folder, or of an authors' file."""
    files = [Path(path)] if is_torch_file(path) else exported_files(path)
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def load_arrays(folder: str | Path) -> dict[str, np.ndarray]:
    """Return the arrays by name. Raises UserError if they cannot be read, or have numbers that are not finite."""
    file = exported_files(folder)[0]
    with readable_as("gates", folder):
        arrays = load_file(file)
    check_finite(folder, arrays)
    return arrays


def load_tree(folder: str | Path, like: Any) -> Any:
    """Return the pytree that `save_tree` wrote.

    Args:
        like: a pytree of the shapes and dtypes wanted, with shardings (`jax.eval_shape` of what made it).

    Raises:
        UserError: the folder's arrays do not match `like`.
    """
    arrays, wanted = load_arrays(folder), leaves_by_path(like)
    for name in sorted(arrays.keys() | wanted.keys()):
        shape, expected = (x[name].shape if name in x else "nothing" for x in (arrays, wanted))
        if shape != expected:
            raise UserError(f"{folder}: {name} should be {expected}, found {shape}")
    with use_mesh():
        leaves = [put(arrays[name].astype(x.dtype), *_spec(x)) for name, x in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _spec(leaf: Any) -> tuple[Any, ...]:
    return () if leaf.sharding is None else tuple(leaf.sharding.spec)


def write_made_for(folder: str | Path, made_for: MadeFor) -> None:
    """Write into a folder's `config.json` which model it was made for. Do nothing if there is no such file."""
    file = Path(folder) / DESCRIPTION
    if file.is_file():
        write_text(file, json.dumps(json.loads(file.read_text()) | made_for.description, indent=1))


def is_exported(folder: str | Path) -> bool:
    """Return True for a folder with an export, and for the name of built-in gates."""
    path = Path(folder)
    return str(folder) in GATES or ((path / DESCRIPTION).is_file() and weights_file(path).is_file())


def weights_file(folder: Path) -> Path:
    """Return the file in a folder with the trained parameters or the head pattern."""
    return next(
        (folder / name for name in (TABLE, WEIGHTS, PUBLISHED) if (folder / name).is_file()), folder / WEIGHTS
    )


def exported_files(folder: str | Path) -> tuple[Path, Path]:
    """Return the files with the weights and the description. `folder` may also be a name of built-in gates
    (`kvjax.builtin.GATES`), or the folder of a training run with one export. Raises UserError if a file is missing."""
    folder = builtin_gates(str(folder)) if str(folder) in GATES else export_folder(Path(folder))
    files = weights_file(folder), folder / DESCRIPTION
    for file in files:
        if not file.is_file():
            hint = ""
            if (folder / "checkpoints").is_dir():
                hint = f": python -m kvjax.export {shlex.quote(str(folder))} exports a run's last checkpoint"
            raise UserError(f"{folder} holds no gates: it has no {file.name}{hint}")
    return files


def export_folder(folder: Path) -> Path:
    """Return the export in a training run's folder; any other folder is returned unchanged."""
    if weights_file(folder).is_file() or not (folder / "checkpoints").is_dir():
        return folder
    exports = [
        file.parent
        for name in (WEIGHTS, TABLE)
        for file in folder.glob(f"*/{name}")
        if not file.parent.name.startswith(".")
    ]
    return exports[0] if len(exports) == 1 else folder
