"""Tests of Orbax exports."""

import jax
import pytest

from kvjax.checkpoints.orbax import export, restore_export
from kvjax.errors import UserError
from kvjax.mesh import make_mesh
from tests.train.states import made


def test_export_holds_arrays_by_name(tmp_path):
    import orbax.checkpoint as ocp

    state = made(make_mesh(fsdp=8))
    for _ in range(2):  # the second replaces the first
        export(tmp_path / "exported", state)
    with ocp.StandardCheckpointer() as checkpointer:
        names = checkpointer.metadata(tmp_path / "exported").item_metadata.tree.keys()
    assert set(names) == {"weights", "moments.mu", "moments.nu", "count"}


@pytest.mark.parametrize(
    ("name", "text"), [("_METADATA", "{}"), ("_CHECKPOINT_METADATA", "[" * 100_000), ("manifest.ocdbt", "")]
)
def test_damaged_export_raises_one_line(tmp_path, name, text):
    arrays = {"a": jax.numpy.arange(4.0)}
    export(tmp_path / "exported", arrays)
    like = {"a": jax.ShapeDtypeStruct((4,), jax.numpy.float32, sharding=arrays["a"].sharding)}
    assert restore_export(tmp_path / "exported", like)["a"].tolist() == [0, 1, 2, 3]
    (tmp_path / "exported" / name).write_text(text)
    with pytest.raises(UserError, match=r"exported: not a whole Orbax export"):
        restore_export(tmp_path / "exported", like)
