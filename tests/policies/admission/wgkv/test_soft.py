"""Test gates in training: both forms of the sparsity term on a worked example, and the floor."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.policies.admission.wgkv import GATE_FLOOR, WriteGateTraining
from tests.policies.admission.admitted import layer
from tests.policies.steps import step


def test_sparsity_forms_match_a_worked_example(gates):
    """For N 4, W 2 and g [.5, 1, 0, .2], the lifetime form gives .96875. The paper's gives .5275 plus the amount that
    the floor under the third gate adds (spec/wgkv §12.3)."""
    gate = jnp.asarray([[[0.5, 1.0, 0.0, 0.2]]])
    paper = 0.5275 + GATE_FLOOR * (2 - GATE_FLOOR) / 4
    at = step([[0, 1, 2, 3]])
    forms: tuple[tuple[Literal["lifetime", "paper"], float], ...] = ("lifetime", 0.96875), ("paper", paper)
    for form, want in forms:
        method = WriteGateTraining(gates, jnp.float32(0.1), window=2, sparsity=form)
        found = jax.jit(lambda method: method.figures(gate, at, None))(method)
        np.testing.assert_allclose(found["sparsity"], want, atol=1e-6)
    np.testing.assert_allclose(found["kv_size"], 1.0)


def test_the_soft_gate_has_a_floor(gates):
    at = step([[0, 1]])
    closed = layer(gates, 0)
    closed.b2[...] = np.asarray(closed.b2[...]) - 1e3
    method = WriteGateTraining(closed, jnp.float32(0.1), window=1)
    _, [mask] = jax.jit(lambda method: method.masks(at))(method)
    assert mask.weight is None
    assert mask.end is None
    np.testing.assert_allclose(mask.log_gate, np.log(GATE_FLOOR), rtol=1e-6)
