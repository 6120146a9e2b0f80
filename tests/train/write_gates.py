"""Write gates for the test-size model: the recipe that the tests of several modules train and validate."""

import functools

import jax
import numpy as np

from kvjax.mesh import make_mesh
from kvjax.train.batches import Rows, to_mesh
from kvjax.train.recipes.wgkv import WriteGates
from kvjax.train.update import TrainState
from kvjax.train.validation import make_validate
from tests.tiny_models import tiny_gates, tiny_model

CONFIG = WriteGates(window=4, lambda_=0.3, sequences=5, lr=1e-2, expand=4.0)
WINDOW, TAU = 5, 0.5
"""Window and threshold of the gates that are validated."""


def batch(mesh, seed=0, length=24):
    """Return eight rows of tokens on the mesh."""
    tokens = np.random.default_rng(seed).integers(0, 61, (8, length)).astype(np.int32)
    return to_mesh(mesh, Rows(np.arange(8), 8, 0), tokens)


def held_out():
    """Return three sequences of 24 tokens and two of 40."""
    random = np.random.default_rng(5)
    return [random.integers(0, 61, length).astype(np.int32) for length in (24, 24, 24, 40, 40)]


@functools.cache
def validated(shape):
    """Return the recipe, the mesh, the model, its gates and the results of `validate`."""
    config = WriteGates(mesh=shape, window=WINDOW, tau=TAU)
    mesh = make_mesh(shape.data, shape.fsdp, shape.tensor)
    with jax.set_mesh(mesh):
        model = tiny_model()
        gates = tiny_gates(model)
        validate = make_validate(config, mesh, held_out())
        return config, mesh, model, gates, validate(TrainState(gates, None), model)
