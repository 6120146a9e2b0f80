"""The decoder against outputs that transformers' torch models once gave (`make_goldens.py`)."""

import numpy as np
import pytest

from kvjax.mesh import put, use_mesh
from kvjax.models import load_model
from tests.models.cases import CASES, POSITIONS, TOKENS, tokens, write_folder
from tests.models.make_goldens import GOLDENS
from tests.models.pieces import ends


@pytest.mark.parametrize("name", CASES)
def test_logits_and_hidden_states_are_those_of_transformers(name, tmp_path):
    model = load_model(write_folder(tmp_path, CASES[name]), max_length=TOKENS)
    golden = np.load(GOLDENS / f"{name}.npz")
    with use_mesh(model):
        found = ends(model, put(tokens()))
    for piece, x in found.items():
        rows = np.asarray(x[0])[list(POSITIONS)]
        np.testing.assert_allclose(rows, golden[piece], rtol=0, atol=1e-4, err_msg=piece)
