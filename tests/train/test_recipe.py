"""What every recipe has: how many rows its batch is on a mesh."""

import dataclasses

from kvjax.command.launch import MeshShape
from kvjax.train.recipes.wgkv import WriteGates


def test_rows_fill_every_data_shard():
    config = WriteGates(mesh=MeshShape(2, 4, 2))
    assert config.rows == 8
    assert dataclasses.replace(config, batch=9).rows == 16
