"""Exported gates: `gates.safetensors` and a `config.json` that says what they are."""

import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from kvjax.builtin import BUILTIN, builtin_gates
from kvjax.errors import UserError
from kvjax.files import write_tensors
from kvjax.mesh import put, use_mesh
from kvjax.policies.admission.wgkv.gate import WriteGate


def save_gates(folder: str | Path, gates: WriteGate, description: dict[str, Any]) -> None:
    """Write `gates.safetensors` and `config.json`. `description` holds tau, window, rate and peak_rate (the mean and
    the largest share of a sequence's tokens that were admitted, layers × kv heads), and whatever else says how they
    were made."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.asarray(param) for name, param in nnx.to_pure_dict(nnx.state(gates)).items()}
    layers, kv_heads, fan_in, width = arrays["w1"].shape
    shape = {"layers": layers, "kv_heads": kv_heads, "head_dim": fan_in // 2, "expand": width / (fan_in // 2)}
    write_tensors(folder / "gates.safetensors", arrays)
    (folder / "config.json").write_text(json.dumps({"method": "wgkv"} | shape | description, indent=1))


def _files(folder: str | Path) -> tuple[Path, Path]:
    """The weights and the description of exported gates."""
    folder = builtin_gates() if str(folder) == BUILTIN else Path(folder)
    files = folder / "gates.safetensors", folder / "config.json"
    for file in files:
        if not file.is_file():
            raise UserError(f"{folder} holds no gates: it has no {file.name}")
    return files


def describe_gates(folder: str | Path) -> dict[str, Any]:
    """The description that `save_gates` wrote. Raises UserError if it cannot be read."""
    file = _files(folder)[1]
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{file}: these are no WG-KV gates, or the file is damaged ({error!r})") from None


def gates_digest(folder: str | Path) -> str:
    """What exported gates are known by, weights and description: other gates in the same folder have another one."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in _files(folder))).hexdigest()[:16]


def load_gates(folder: str | Path, model: Any = None) -> tuple[WriteGate, dict[str, Any]]:
    """The gates and the description that `save_gates` wrote; `builtin` is the folder of those that come with kvjax.

    Raises UserError naming the file that is wrong, and for gates that are not for `model`.
    """
    description = describe_gates(folder)
    weights = _files(folder)[0]
    try:
        layers, kv_heads, head_dim = (int(description[key]) for key in ("layers", "kv_heads", "head_dim"))
        expand = float(description["expand"])
        arrays = load_file(weights)
    except Exception as error:
        raise UserError(f"{folder}: these are no WG-KV gates, or the files are damaged ({error!r})") from None
    check_made_for((layers, kv_heads, head_dim), model)
    with use_mesh():
        gates = jax.eval_shape(lambda: WriteGate(layers, kv_heads, head_dim, expand=expand, rngs=nnx.Rngs(0)))
        state = nnx.state(gates)
        for path, param in nnx.to_flat_state(state):
            name, wanted = str(path[-1]), param.get_value()
            if name not in arrays or arrays[name].shape != wanted.shape:
                found = arrays[name].shape if name in arrays else "nothing"
                raise UserError(f"{weights}: {name} should have shape {wanted.shape}, found {found}")
            param.set_value(put(arrays[name].astype(np.float32), *wanted.sharding.spec))
        nnx.update(gates, state)
    return gates, description


def check_made_for(shape: tuple[int, int, int], model: Any) -> None:
    """Refuse gates for another model than `model`, if there is one."""
    if model is not None:
        wanted = (model.config.num_layers, model.config.num_kv_heads, model.config.head_dim)
        if shape != wanted:
            raise UserError(
                f"wgkv: these gates are for (layers, kv heads, head_dim) = {shape}, the model has {wanted}"
            )
