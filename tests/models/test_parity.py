"""Tests of the decoder, submodule by submodule, and of the goldens against transformers' torch models."""

import numpy as np
import pytest

from kvjax.models import load_model
from tests.models.cases import CASES, TOKENS, tokens, write_folder
from tests.models.make_goldens import GOLDENS, at_positions
from tests.models.pieces import pieces

pytest.importorskip("torch")


@pytest.mark.parametrize("name", CASES)
def test_every_piece_matches_transformers(name, tmp_path):
    from tests.models.torch_twin import stages

    folder = write_folder(tmp_path, CASES[name])
    twin = stages(folder, tokens())
    golden = np.load(GOLDENS / f"{name}.npz")
    for piece, rows in at_positions(twin).items():
        np.testing.assert_allclose(rows, golden[piece], rtol=0, atol=2e-5, err_msg=f"golden {piece}")

    ours = pieces(load_model(folder, max_length=TOKENS), tokens(), twin["x"], twin["mlp_in"])
    for piece, x in ours.items():
        atol = 1e-4 if piece in ("hidden", "logits") else 1e-5
        np.testing.assert_allclose(x, twin[piece], rtol=0, atol=atol, err_msg=piece)
