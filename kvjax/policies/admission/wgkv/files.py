"""Write gates as `kvjax.exported.folder` has them: weights and a description."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from kvjax.errors import UserError
from kvjax.exported.folder import describe, exported_files, load_arrays, save_exported
from kvjax.mesh import put, use_mesh
from kvjax.policies.admission.wgkv.gate import WriteGate


def save_gates(folder: str | Path, gates: WriteGate, description: dict[str, Any]) -> None:
    """Write an export. `description` holds tau, window, rate and peak_rate (the mean and the largest share of a
    sequence's tokens that were admitted, layers × kv heads), and whatever else says how they were made."""
    arrays = {name: np.asarray(param) for name, param in nnx.to_pure_dict(nnx.state(gates)).items()}
    layers, kv_heads, fan_in, width = arrays["w1"].shape
    shape = {"layers": layers, "kv_heads": kv_heads, "head_dim": fan_in // 2, "expand": width / (fan_in // 2)}
    save_exported(folder, arrays, {"method": "wgkv"} | shape | description)


def load_gates(folder: str | Path, model: Any = None) -> tuple[WriteGate, dict[str, Any]]:
    """The gates and the description that `save_gates` wrote; `builtin` is the folder of those that come with kvjax.

    Raises UserError naming the file that is wrong, and for gates that are not for `model`.
    """
    description, arrays = describe(folder), load_arrays(folder)
    weights = exported_files(folder)[0]
    try:
        layers, kv_heads, head_dim = (int(description[key]) for key in ("layers", "kv_heads", "head_dim"))
        expand = float(description["expand"])
    except Exception as error:
        raise UserError(f"{folder}: these are no WG-KV gates, or the files are damaged ({error!r})") from None
    check_made_for((layers, kv_heads, head_dim), getattr(model, "config", None))
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
    """Refuse gates for a model of another configuration than `model`, if there is one."""
    if model is not None:
        wanted = (model.num_layers, model.num_kv_heads, model.head_dim)
        if shape != wanted:
            raise UserError(
                f"wgkv: these gates are for (layers, kv heads, head_dim) = {shape}, the model has {wanted}"
            )
