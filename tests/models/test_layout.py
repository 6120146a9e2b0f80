"""Tests of the layout of fused arrays."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.models.layout import FUSED, flat_shape, fuse, parts_of, unfuse
from tests.tiny_models import tiny_config


def test_queries_key_and_value_of_a_group_are_adjacent():
    config = tiny_config(num_heads=4, num_kv_heads=2, head_dim=2)
    columns = unfuse("qkv", np.arange(16), config)
    assert columns["q"].tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    assert columns["k"].tolist() == [4, 5, 12, 13]
    assert columns["v"].tolist() == [6, 7, 14, 15]


@pytest.mark.parametrize(
    ("width", "kv_heads", "block"), [(14336, 8, 128), (9728, 8, 64), (48, 4, 2), (1536, 3, 64), (4864, 2, 32)]
)
def test_gate_and_up_alternate_in_blocks_that_no_mesh_splits(width, kv_heads, block):
    config = tiny_config(num_kv_heads=kv_heads, num_heads=kv_heads, mlp_width=width)
    gate, up = unfuse("gate_up", np.arange(2 * width), config).values()
    place = np.arange(width)
    np.testing.assert_array_equal(gate, place // block * 2 * block + place % block)
    np.testing.assert_array_equal(up, gate + block)


@pytest.mark.parametrize("path", FUSED)
def test_fuse_inverts_unfuse(path):
    config = tiny_config(num_heads=8, num_kv_heads=4)
    size = sum(flat_shape(part, config)[-1] for part in parts_of(path))
    x = jnp.arange(3 * size).reshape(3, size)
    np.testing.assert_array_equal(fuse(path, unfuse(path, x, config), config), x)
