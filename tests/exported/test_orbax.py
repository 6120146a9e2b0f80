"""An export for Orbax: its arrays by name."""

from kvjax.exported.orbax import export
from kvjax.mesh import make_mesh
from tests.train.states import made


def test_an_export_is_a_mapping_of_names(tmp_path):
    import orbax.checkpoint as ocp

    state = made(make_mesh(fsdp=8))
    for _ in range(2):  # the second replaces the first
        export(tmp_path / "exported", state)
    with ocp.StandardCheckpointer() as checkpointer:
        names = checkpointer.metadata(tmp_path / "exported").item_metadata.tree.keys()
    assert set(names) == {"weights", "moments.mu", "moments.nu", "count"}
