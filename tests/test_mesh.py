"""Tests of meshes over several slices, which a slow network connects."""

import dataclasses

import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.mesh import make_mesh


@dataclasses.dataclass(frozen=True)
class Chip:
    """A stand-in for a device, with the attributes that meshes use."""

    id: int
    slice_index: int
    platform: str = "cpu"
    device_kind: str = "cpu"

    @property
    def process_index(self):
        return self.slice_index


CHIPS = [Chip(index, index // 4) for index in range(8)]


@pytest.mark.parametrize(
    ("sizes", "slices"),
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, [[[0, 0], [0, 0]], [[1, 1], [1, 1]]]),
        ({"fsdp": 4, "tensor": 2}, [[0, 0], [0, 0], [1, 1], [1, 1]]),
        ({"tensor": 8}, [0, 0, 0, 0, 1, 1, 1, 1]),
        ({"fsdp": 4}, [0, 0, 0, 0]),
    ],
)
def test_outer_axes_are_split_over_slices(sizes, slices):
    mesh = make_mesh(**sizes, devices=CHIPS)
    assert {axis: size for axis, size in mesh.shape.items() if size > 1} == sizes
    np.testing.assert_array_equal(np.vectorize(lambda chip: chip.slice_index)(mesh.devices).squeeze(), slices)


def test_mesh_that_does_not_fill_the_slices_is_refused():
    with pytest.raises(
        UserError, match="make_mesh: data=3, tensor=2 does not fill 2 slices of devices evenly"
    ):
        make_mesh(data=3, tensor=2, devices=CHIPS)
