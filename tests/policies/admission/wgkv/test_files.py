"""Gates in files: read as they were written, and refused for another model or when damaged."""

from typing import Any

import jax
import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.policies import make_policy
from kvjax.policies.admission.wgkv import load_gates, save_gates
from tests.tiny_models import tiny_model


def test_gates_survive_a_round_trip_and_refuse_another_model(tmp_path, model, gates):
    rate = np.full((3, 4), 0.25).tolist()
    save_gates(tmp_path, gates, {"tau": 0.2, "window": 6, "rate": rate})
    read, description = load_gates(tmp_path)
    assert description["window"] == 6
    jax.tree.map(np.testing.assert_array_equal, read, gates)
    policy: Any = make_policy("wgkv", model=model, gates=tmp_path)
    assert policy.window == 6
    np.testing.assert_allclose(policy.admission.tau, 0.2)
    np.testing.assert_allclose(policy.expected_entries(106, 1), 5 + 0.25 * 101)
    other = tiny_model(num_layers=2)
    with pytest.raises(UserError, match=r"\(3, 4, 8\), the model has \(2, 4, 8\)"):
        make_policy("wgkv", model=other, gates=tmp_path)
    (tmp_path / "gates.safetensors").write_bytes(b"junk")
    with pytest.raises(UserError, match="damaged"):
        make_policy("wgkv", model=model, gates=tmp_path)


def test_mistakes_are_named_in_one_line(model):
    with pytest.raises(UserError, match="nowhere holds no gates") as caught:
        make_policy("wgkv", model=model, gates="nowhere")
    assert "\n" not in str(caught.value)
