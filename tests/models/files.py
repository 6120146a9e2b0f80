"""The config of a wider model, and a check that two models are equal."""

import jax
import numpy as np

from tests.models.cases import LLAMA

WIDE = LLAMA | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}


def parameters(model) -> dict[str, np.ndarray]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(model)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def assert_equal(model, other):
    ours, theirs = parameters(model), parameters(other)
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        np.testing.assert_array_equal(x, theirs[name], err_msg=name)
