"""Files of gates in the layout that Fast KVzip's authors publish, with random numbers."""

import numpy as np

from tests.checkpoints.torch_files import Numpy, write_torch


def layer_arrays(*, kv_heads, group, width, dim=16, sinks=16, dtype=np.float32, seed=0):
    """Return the arrays of one layer by name."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    projections = {
        "q_proj.weight": draw(kv_heads * group * dim, width),
        "q_proj.bias": draw(kv_heads * group * dim),
        "k_proj.weight": draw(kv_heads * dim, width),
        "b": draw(kv_heads, 1, group),
    }
    norms = {"q_norm.weight": draw(dim), "k_norm.weight": draw(dim), "k_base": draw(kv_heads, 1, sinks, dim)}
    return {name: array.astype(dtype) for name, array in projections.items()} | norms


def write_published(file, *, layers, **sizes):
    """Write a file; return it and each layer's arrays."""
    arrays = [layer_arrays(**sizes, seed=seed) for seed in range(layers)]
    losses = {name: Numpy(np.ones(layers)) for name in ("loss", "acc", "loss_train", "acc_train")}
    write_torch(file, {"module": arrays} | losses, folder=file.stem)
    return file, arrays
