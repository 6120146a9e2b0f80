"""KVzap's surrogate in float64, and folders in NVIDIA's layout."""

import json
import math
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

LAYERS, HEADS, WIDTH = 3, 4, 32
"""The sizes of the tiny model."""


def predictions(arrays: dict[str, np.ndarray], layer: int, x: np.ndarray) -> np.ndarray:
    """Return a layer's predictions [k t] for inputs [t d], from arrays by their published names."""
    own = {
        name.removeprefix(f"layers.{layer}."): np.float64(value)
        for name, value in arrays.items()
        if name.startswith(f"layers.{layer}.")
    }
    if "weight" in own:
        return (x @ own["weight"].T + own["bias"]).T
    hidden = x @ own["0.weight"].T + own["0.bias"]
    gelu = 0.5 * hidden * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2)))
    return (gelu @ own["2.weight"].T + own["2.bias"]).T


def write_published(folder: Path, hidden: int | None, heads: int = HEADS, **changes) -> dict[str, np.ndarray]:
    """Write a surrogate with random weights as transformers does. Return its arrays."""
    random, arrays = np.random.default_rng(5), {}
    for layer in range(LAYERS):
        shapes = {"": (heads, WIDTH)} if hidden is None else {"0.": (hidden, WIDTH), "2.": (heads, hidden)}
        for part, shape in shapes.items():
            weight = random.standard_normal(shape) / np.sqrt(shape[1])
            arrays[f"layers.{layer}.{part}weight"] = (2 * weight).astype(np.float32)
            arrays[f"layers.{layer}.{part}bias"] = 0.1 * random.standard_normal(shape[0]).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["KVzapModel"], "dtype": "float32", "hidden_dim": hidden, "input_dim": WIDTH,
        "model_type": "kvzap", "n_modules": LAYERS, "output_dim": heads, "transformers_version": "5.2.0",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | changes))
    return arrays
