"""Test a step's rows on the mesh."""

import jax
import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.mesh import P, make_mesh
from kvjax.train.batches import Rows, to_mesh


@pytest.mark.parametrize("shape", [{"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}, {"tensor": 8}])
def test_rows_are_split_over_the_mesh(shape):
    mesh = make_mesh(**shape)
    rows = Rows.of_this_process(mesh, 8)
    assert (rows.own.tolist(), rows.group, rows.groups) == (list(range(8)), 0, 1)
    tokens = np.arange(24, dtype=np.int32).reshape(8, 3)
    placed = to_mesh(mesh, rows, tokens)
    np.testing.assert_array_equal(np.asarray(placed), tokens)
    assert placed.sharding.spec == P(("data", "fsdp"), None)
    assert placed.addressable_shards[0].data.shape[0] == 8 // (mesh.shape["data"] * mesh.shape["fsdp"])
    assert isinstance(placed, jax.Array)


def parts_of(parts, total):
    return [Rows.of_process(parts, process, total) for process in parts]


def test_a_part_of_the_rows_has_a_group():
    """TPU hosts have every second row, and hosts that split heads have the same rows."""
    even, odd = parts_of({0: {0, 2, 4, 6}, 1: {1, 3, 5, 7}}, 8)
    assert (even.group, odd.group, odd.groups, odd.count) == (0, 1, 2, 4)
    assert np.arange(4)[odd.within(slice(5, 6))] == 2
    shared = parts_of({0: {0, 1, 4, 5}, 1: {2, 3, 6, 7}, 2: {0, 1, 4, 5}, 3: {2, 3, 6, 7}}, 8)
    assert [(rows.group, rows.groups) for rows in shared] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert shared[1].within(slice(6, 8)) == slice(2, 4)


@pytest.mark.parametrize("parts", [{0: {0, 1}, 1: {1, 2}, 2: {3, 0}}, {0: {0, 1, 2}, 1: {3}}])
def test_unequal_or_overlapping_parts_are_refused(parts):
    with pytest.raises(UserError, match="different parts of an update's 4 rows"):
        parts_of(parts, 4)
