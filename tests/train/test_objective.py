"""What recipes minimise."""

import jax
import jax.numpy as jnp

from kvjax.mesh import make_mesh
from kvjax.train.objective import student_errors
from kvjax.train.recipes.wgkv import WriteGates
from tests.tiny_models import filled, tiny_config


def test_the_error_is_in_float32():
    with jax.set_mesh(make_mesh()):
        model = filled(tiny_config(), jnp.bfloat16)
        config = WriteGates(window=4)
        gates = jax.jit(config.init)(model)
        tokens = jnp.zeros((1, 8), jnp.int32)
        squares, _ = student_errors(config.masks(gates), model, tokens, model.hidden(tokens), window=4)
    assert squares.dtype == jnp.float32
