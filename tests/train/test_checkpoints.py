"""Test that checkpoints are restored exactly onto any mesh, and the errors for unusable ones."""

import shutil
from collections import namedtuple

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from kvjax.checkpoints.orbax import abstract, export
from kvjax.errors import UserError
from kvjax.mesh import make_mesh
from kvjax.train.checkpoints import Checkpoints
from tests.train.states import State, made, make


def same(a, b):
    return all(
        np.array_equal(np.asarray(x), np.asarray(y))
        for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)
    )


@pytest.mark.parametrize("shape", [{"fsdp": 8}, {"fsdp": 2, "tensor": 4}, {}])
def test_a_state_is_restored_onto_another_mesh(tmp_path, shape):
    state = made(make_mesh(fsdp=4, tensor=2))
    saving = Checkpoints(tmp_path / "checkpoints", keep=2)
    saving.save(5, state, {"data": [{"next": 7}], "told": "a: 1"})
    saving.close()
    mesh = make_mesh(**shape)
    with jax.set_mesh(mesh):
        loading = Checkpoints(tmp_path / "checkpoints", keep=2)
        assert loading.latest() == 5
        restored, notes = loading.restore(5, abstract(make, mesh)), loading.notes(5)
        loading.close()
    assert notes == {"data": [{"next": 7}], "told": "a: 1"}
    assert isinstance(restored, State)
    assert same(restored, state)
    assert restored.weights.sharding.mesh == mesh
    assert restored.weights.sharding.spec == P("tensor", "fsdp")


def test_the_last_checkpoints_hold_the_states_of_their_steps(tmp_path):
    """The next update reuses the state's memory while the previous save is still being written."""
    mesh = make_mesh(fsdp=8)
    with jax.set_mesh(mesh):
        advance = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
        state, states = made(mesh, size=2048), {}
        checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
        for step in range(1, 6):
            states[step] = jax.tree.map(np.array, state)
            checkpoints.save(step, state, {})
            state = advance(state)
        checkpoints.close()
        checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
        for step in (4, 5):
            restored = checkpoints.restore(step, abstract(lambda: make(2048), mesh))
            assert same(restored, states[step])
        checkpoints.close()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["4", "5"]


def test_another_runs_checkpoint_is_refused_with_both_shapes(tmp_path):
    mesh = make_mesh(fsdp=8)
    with jax.set_mesh(mesh):
        checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
        checkpoints.save(1, made(mesh), {})
        checkpoints.close()
        checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
        with pytest.raises(
            UserError, match=r"step 1 .*moments.mu has shape \(16, 8\), this run needs \(32, 8\)"
        ):
            checkpoints.restore(1, abstract(lambda: make(32), mesh))
        checkpoints.close()


def test_without_a_save_there_is_no_latest_step(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    assert checkpoints.latest() is None
    checkpoints.close()


def test_a_full_disk_is_an_error_and_keeps_saved_checkpoints(tmp_path, monkeypatch):
    state = made(make_mesh(fsdp=8))
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    checkpoints.save(1, state, {})
    nearly_full = namedtuple("Usage", "free")(100)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: nearly_full)
    for write in (lambda: checkpoints.save(2, state, {}), lambda: export(tmp_path / "exported", state)):
        with pytest.raises(UserError, match=r"the disk is full: 0\.0 MiB to write, 0\.0 MiB left"):
            write()
    checkpoints.close()
    assert Checkpoints(tmp_path / "checkpoints", keep=2).latest() == 1
