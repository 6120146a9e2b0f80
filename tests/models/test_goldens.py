"""Tests of the decoder against stored outputs of transformers' torch models (`make_goldens.py`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.mesh import P, make_mesh, put, use_mesh
from kvjax.models import load_model, read_config
from kvjax.models.rope import cos_sin
from tests.models.cases import CASES, POSITIONS, TOKENS, tokens, write_folder
from tests.models.make_goldens import GOLDENS
from tests.models.pieces import ends


def assert_golden(name: str, piece: str, found, atol: float):
    golden = np.load(GOLDENS / f"{name}.npz")
    np.testing.assert_allclose(np.asarray(found), golden[piece], rtol=0, atol=atol, err_msg=f"{name} {piece}")


@pytest.mark.parametrize("name", CASES)
def test_hidden_states_and_logits_match_transformers(name, tmp_path):
    model = load_model(write_folder(tmp_path, CASES[name]), max_length=TOKENS)
    with use_mesh(model):
        found = ends(model, put(tokens()))
    for piece, x in found.items():
        assert_golden(name, piece, x[0, list(POSITIONS)], atol=1e-4)


@pytest.mark.slow
def test_rotary_angles_match_transformers(tmp_path):
    for name, case in CASES.items():
        config = read_config(write_folder(tmp_path / name, case, {}), TOKENS)
        rope = config.sliding_rope if config.slides[1] and config.sliding_rope is not None else config.rope
        angles = cos_sin(rope, config.head_dim, jnp.array([POSITIONS]))
        for piece, x in zip(("cos", "sin"), angles, strict=True):
            # a last bit of the frequency is 3e-5 radians at position 511
            assert_golden(name, piece, x[0], atol=1e-6)


@pytest.mark.mesh
@pytest.mark.parametrize("shape", [{"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_mesh_does_not_change_the_outputs(shape, tmp_path):
    name = "qwen3_biases"
    with jax.set_mesh(make_mesh(**shape)):
        model = load_model(write_folder(tmp_path, CASES[name]))
        rows = put(np.repeat(tokens(), 4, 0), ("data", "fsdp"), None)
        found = ends(model, rows)
        assert jax.typeof(found["logits"]).sharding.spec == P(("data", "fsdp"), None, None)
    for piece, x in found.items():
        for row in np.asarray(x):
            assert_golden(name, piece, row[list(POSITIONS)], atol=1e-4)
