"""What a run leaves for use: the gates as safetensors and as an Orbax checkpoint, with how they were made."""

from pathlib import Path

import jax
import numpy as np

from kvjax.mesh import AXES, gather
from kvjax.orbax_export import export
from kvjax.policies.admission.wgkv import WriteGate, save_gates
from kvjax.train.config import TrainConfig
from kvjax.train.validation import Validation


def export_gates(folder: Path, gates: WriteGate, config: TrainConfig, found: Validation) -> None:
    """Write `gates.safetensors`, `config.json` and the folder `orbax`. `kvjax.make_policy("wgkv", gates=folder)` reads
    them; the rates, of held-out sequences, size its pool."""
    description = {
        "tau": config.tau,
        "window": config.window,
        "rate": _rounded(found.rates.mean(0)),
        "peak_rate": _rounded(found.rates.max(0)),
        "validation": found.numbers,
        "model": config.model,
        "data": config.data,
        "lambda": config.lambda_,
        "sparsity": config.sparsity,
        "sequences": config.sequences,
        "batch": config.rows,
        "lengths": list(config.lengths),
        "seed": config.seed,
    }
    whole = gather(gates, *AXES)
    if jax.process_index() == 0:
        save_gates(folder, whole, description)
    export(folder / "orbax", gates)


def _rounded(rates: np.ndarray) -> list[list[float]]:
    return np.round(rates.astype(np.float64), 4).tolist()
