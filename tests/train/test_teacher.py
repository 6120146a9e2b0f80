"""Test a teacher's stored outputs: found by the tokens, written once, and refused if they are another teacher's."""

import jax
import numpy as np
import pytest

from kvjax.cli.shards import Shard
from kvjax.errors import UserError
from kvjax.mesh import make_mesh
from kvjax.train import teacher
from kvjax.train.objective import TOKENS_AT_ONCE
from kvjax.train.teacher import TeacherStore, fill_store, shapes
from tests.tiny_models import tiny_model

COUNT, LENGTH = 5, 24
ROWS = np.random.default_rng(0).integers(0, 61, (7, LENGTH)).astype(np.int32)
STEPS, HELD_OUT = [ROWS[:2], ROWS[2:4], ROWS[4:6]], [ROWS[6]]


def fill(folder, mesh, model=None, data=1, **share):
    """Store the teacher's outputs; the model is the tiny one by default."""
    with jax.set_mesh(mesh):
        model = tiny_model() if model is None else model
        store = TeacherStore(folder, COUNT)
        store.begin(model, "tiny")
        fill_store(
            store,
            model,
            iter(STEPS),
            HELD_OUT,
            mesh=mesh,
            tokens=6 * LENGTH,
            settings={"data": data},
            **share,
        )
    return store


@pytest.fixture(scope="module")
def logits():
    with jax.set_mesh(make_mesh()):
        model = tiny_model()
        return np.asarray(jax.jit(lambda x: model.logits(model.hidden(x)))(ROWS))


@pytest.mark.slow
def test_the_likeliest_tokens_and_their_relative_logits_are_stored(tmp_path, logits, monkeypatch):
    """The teacher processes parts of a sequence, on a mesh that splits the rows."""
    monkeypatch.setattr(teacher, "TOKENS_AT_ONCE", 10)
    store = fill(tmp_path / "store", make_mesh(fsdp=2, tensor=2))
    actual = store.read(ROWS[3:7])
    order = np.argsort(-logits[3:7], kind="stable")[..., :COUNT]
    best = np.take_along_axis(logits[3:7], order, -1)
    np.testing.assert_array_equal(actual["which"], order)
    np.testing.assert_allclose(actual["logits"], best - best[..., :1], rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(actual["tokens"], ROWS[3:7])
    expected = shapes(LENGTH, COUNT)
    assert {name: (x.shape[1:], x.dtype) for name, x in actual.items()} == {
        name: (x.shape, x.dtype) for name, x in expected.items()
    }
    assert TOKENS_AT_ONCE > LENGTH


def test_shares_add_up_to_all_sequences(tmp_path):
    folder = tmp_path / "store"
    for index, count in (
        (0, 5),
        (1, 7),
    ):  # the first share has two of the three steps and the held-out sequence
        store = fill(folder, make_mesh(), share=Shard(index, 2))
        assert len(list(folder.glob("??/*.npz"))) == count
        assert not store.finished({"data": 1}).exists()
    assert fill(folder, make_mesh()).finished({"data": 1}).exists()


def test_stored_sequences_are_not_computed_again(tmp_path, monkeypatch):
    folder, mesh, runs = tmp_path / "store", make_mesh(), []
    hidden = teacher._hidden
    monkeypatch.setattr(teacher, "_hidden", lambda *x: runs.append(1) or hidden(*x))
    store = fill(folder, mesh)
    assert len(runs) == 7
    before = {file: file.stat().st_mtime_ns for file in folder.glob("??/*.npz")}
    assert len(before) == 7
    fill(folder, mesh)
    assert len(runs) == 7
    fill(folder, mesh, data=2)  # this is other data that happens to have the same sequences
    assert len(runs) == 7

    lost = sorted(before)[2]
    lost.unlink()
    with pytest.raises(
        UserError, match=rf"{lost.name}: is missing or damaged .*: remove it and .*finished-\*, and give"
    ):
        store.read(ROWS)
    for file in folder.glob("finished-*"):
        file.unlink()
    fill(folder, mesh)
    assert len(runs) == 8
    assert {file: file.stat().st_mtime_ns for file in before if file != lost} == {
        file: x for file, x in before.items() if file != lost
    }
    lost.write_bytes(lost.read_bytes()[:100])
    with pytest.raises(UserError, match=rf"{lost.name}: is missing or damaged"):
        store.read(ROWS)


def test_a_folder_of_another_teacher_is_refused(tmp_path):
    """It may be of another model, or of this one trained a little further, which has the same fingerprint."""
    mesh = make_mesh()
    store = fill(tmp_path / "store", mesh)
    with jax.set_mesh(mesh):
        other = tiny_model(num_layers=2)
        further = jax.tree.map(lambda x: x * (1 + 1e-5), tiny_model())
        with pytest.raises(UserError, match=r"are of the model tiny, not of other.* \(--out, --teacher\)"):
            store.begin(other, "other")
        with pytest.raises(UserError, match="the teacher's logits are of weights .*, not .*: name another"):
            store.begin(further, "tiny")
        with pytest.raises(UserError, match="are of teacher_tokens 5, not 6: name another"):
            TeacherStore(tmp_path / "store", 6).begin(tiny_model(), "tiny")


def test_a_disk_that_is_too_small_is_refused_before_anything_is_computed(tmp_path, monkeypatch):
    monkeypatch.setattr(teacher, "_hidden", None)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Disk", (), {"free": 1 << 26}))
    with pytest.raises(
        UserError, match=r"likeliest after each of 144 tokens take [0-9.]+ KiB in .*--teacher model"
    ):
        fill(tmp_path / "store", make_mesh())


def test_finished_results_survive_a_full_disk(tmp_path, monkeypatch):
    savez, written = np.savez, []

    def filling(out, **arrays):
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        written.append(1)
        savez(out, **arrays)

    monkeypatch.setattr(np, "savez", filling)
    with pytest.raises(
        UserError, match="store: the disk is full: sequences are finished and stay; the same command"
    ):
        fill(tmp_path / "store", make_mesh())
    assert len(list((tmp_path / "store").glob("??/*"))) == 3, "no partial files are left"
