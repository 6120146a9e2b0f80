"""What a run leaves for use."""

import jax
import numpy as np

from kvjax.mesh import make_mesh
from kvjax.policies import make_policy
from kvjax.policies.admission.wgkv import describe_gates
from kvjax.train.config import TrainConfig
from kvjax.train.exported import export_gates
from kvjax.train.validation import Validation
from tests.tiny_models import tiny_gates, tiny_model


def test_exported_rates_are_the_mean_and_the_largest(tmp_path):
    rates = np.linspace(0, 1, 24).reshape(2, 3, 4)
    with jax.set_mesh(make_mesh()):
        model = tiny_model()
        gates = tiny_gates(model)
        found = Validation(1.0, 1.0, 0.5, 0.5, 0.5, 2, rates)
        export_gates(tmp_path / "gates", gates, TrainConfig(window=6), found)
        policy = make_policy("wgkv", model=model, gates=tmp_path / "gates")
    np.testing.assert_allclose(policy.admission.rate, rates.max(0), atol=1e-4)
    np.testing.assert_allclose(describe_gates(tmp_path / "gates")["rate"], rates.mean(0), atol=1e-4)
