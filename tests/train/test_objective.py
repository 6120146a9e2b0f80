"""What recipes minimise, and the masks that they minimise it under."""

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.mesh import make_mesh
from kvjax.struct import changed
from kvjax.train.objective import deployed_mask, student_errors
from kvjax.train.recipes.wgkv import WriteGates
from tests.inference.delayed import delayed
from tests.policies.steps import step
from tests.tiny_models import filled, tiny_config


def test_the_error_is_in_float32():
    with jax.set_mesh(make_mesh()):
        model = filled(tiny_config(), jnp.bfloat16)
        config = WriteGates(window=4)
        gates = jax.jit(config.init)(model)
        tokens = jnp.zeros((1, 8), jnp.int32)
        squares, _ = student_errors(config.masks(gates), model, tokens, model.hidden(tokens), window=4)
    assert squares.dtype == jnp.float32


def test_training_adds_it_too():
    """A bias, in the mask that `deployed_mask` makes of an admission."""
    policy = delayed(window=6, delay=2, biased=True)
    at = step(np.arange(20)[None])
    admission = changed(policy.admission, threshold=jnp.float32(0))
    _, mask = deployed_mask(admission, at, 6)
    np.testing.assert_array_equal(mask.log_gate, admission.bias(None, at))
    assert deployed_mask(changed(admission, biased=False), at, 6)[1].log_gate is None
