"""Test a step's rows on the mesh."""

import jax
import numpy as np
import pytest

from kvjax.mesh import P, make_mesh
from kvjax.train.batches import Rows, to_mesh


@pytest.mark.parametrize("shape", [{"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}, {"tensor": 8}])
def test_rows_are_split_over_the_mesh(shape):
    mesh = make_mesh(**shape)
    rows = Rows.of_this_process(mesh, 8)
    assert rows == Rows(0, 8, 8)
    assert (rows.group, rows.groups) == (0, 1)
    tokens = np.arange(24, dtype=np.int32).reshape(8, 3)
    placed = to_mesh(mesh, rows, tokens)
    np.testing.assert_array_equal(np.asarray(placed), tokens)
    assert placed.sharding.spec == P(("data", "fsdp"), None)
    assert placed.addressable_shards[0].data.shape[0] == 8 // (mesh.shape["data"] * mesh.shape["fsdp"])
    assert isinstance(placed, jax.Array)


def test_a_part_of_the_rows_has_a_group():
    assert (Rows(4, 6, 8).group, Rows(4, 6, 8).groups, Rows(4, 6, 8).count) == (2, 4, 2)
