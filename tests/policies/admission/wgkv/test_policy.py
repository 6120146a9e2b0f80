"""Test the rates that an admission by write gates expects, by τ."""

import numpy as np

from kvjax.policies import make_policy
from kvjax.policies.admission.wgkv import save_gates
from tests.tiny_models import tiny_gates, tiny_model


def test_rates_of_files_are_not_used_with_a_lower_tau(tmp_path):
    model = tiny_model()
    rates = {"rate": np.full((3, 4), 0.25).tolist(), "peak_rate": np.full((3, 4), 0.5).tolist()}
    save_gates(tmp_path, tiny_gates(model), {"tau": 0.2, "window": 6} | rates)
    for tau, rate in ((0.1, 1.0), (0.2, 0.5), (0.3, 0.5)):
        policy = make_policy({"wgkv": {"tau": tau}}, model=model, gates=tmp_path)
        np.testing.assert_allclose(policy.admission.rate, rate)
