"""Test features and targets on disk and in memory: written once, completely or not at all, and read by position."""

import errno
import json
import os
import shutil
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.train.batches import Rows
from kvjax.train.features import FolderStore, HeldOut, MemoryStore, PositionLayout, batches, check_positions
from kvjax.train.validation import in_rows

SIZES = 150, 260
KIND = PositionLayout({"input": ((2, 3), jnp.bfloat16), "score": ((2, 4), jnp.float32)})
MANIFEST = {
    "data": "texts",
    "contexts": ["a", "b"],
    "made_for": {"model": "mine", "fingerprint": "00000000" + "0f" * 4},
}


def fill(store, index):
    random = np.random.default_rng(index)
    with store.writing(index) as arrays:
        for x in arrays.values():
            x[...] = random.standard_normal(x.shape)


@pytest.fixture
def shards(tmp_path):
    store = FolderStore(tmp_path / "targets", KIND, SIZES, MANIFEST)
    for index in range(2):
        fill(store, index)
    return store


def test_disk_and_memory_hold_the_same_features(shards):
    memory = MemoryStore(KIND, SIZES)
    for index in range(2):
        fill(memory, index)
    assert shards.finished == memory.finished == {0, 1}
    positions = np.array([409, 3, 150, 149, 3])
    for name, x in shards.read().take(positions).items():
        np.testing.assert_array_equal(x, memory.read().take(positions)[name])
    inputs = memory.read().take(np.arange(410))["input"]
    assert inputs.dtype == jnp.bfloat16
    np.testing.assert_array_equal(memory.read().take(positions)["input"], inputs[positions])


def test_an_incomplete_context_does_not_count(tmp_path):
    store = FolderStore(tmp_path / "targets", KIND, SIZES, MANIFEST)

    def failing():
        with store.writing(0) as arrays:
            arrays["input"][...] = 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert store.finished == set()
    assert [file.name for file in store.folder.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"made_for": {"model": "other", "fingerprint": "00000000" + "f0" * 4}},
            "of the model mine, not of other",
        ),
        ({"data": "others"}, "of data texts, not others"),
        ({"contexts": ["a", "c"]}, "of other contexts"),
        ({"version": 2}, "of version 1, not 2"),
    ],
)
def test_foreign_targets_are_refused_in_one_line(shards, changes, message):
    with pytest.raises(
        UserError,
        match=rf"^{shards.folder}: these targets are {message}.*name another folder \(--out, --targets\), or "
        "remove it$",
    ):
        FolderStore(shards.folder, KIND, SIZES, MANIFEST | changes)
    with pytest.raises(UserError, match="of other arrays"):
        FolderStore(shards.folder, PositionLayout({"input": ((2, 5), jnp.bfloat16)}), SIZES, MANIFEST)


def test_a_damaged_folder_is_refused_in_one_line(shards):
    score = shards.folder / "00001" / "score.npy"
    score.write_bytes(score.read_bytes()[:-100])
    with pytest.raises(
        UserError, match=f"^{score}: is missing or damaged .*: remove {score.parent} and go on$"
    ):
        shards.read()
    (shards.folder / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"manifest.json: is damaged: name another folder"):
        FolderStore(shards.folder, KIND, SIZES, MANIFEST)


def test_two_runs_may_compute_a_context_at_the_same_time(shards, tmp_path):
    """The run that finishes first keeps its files."""
    first, second = (FolderStore(tmp_path / "shared", KIND, SIZES, MANIFEST) for _ in range(2))
    with first.writing(0):
        fill(second, 0)
    fill(first, 1)
    positions = np.arange(410)
    for name, x in shards.read().take(positions).items():
        np.testing.assert_array_equal(first.read().take(positions)[name], x)
    assert sorted(path.name for path in first.folder.iterdir()) == ["00000", "00001", "manifest.json"]


def test_a_disk_without_space_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    with pytest.raises(
        UserError, match=r"^the targets of 410 positions take [0-9.]+ KiB in .*, whose disk has 1.00 MiB free"
    ):
        FolderStore(tmp_path / "targets", KIND, SIZES, MANIFEST)
    assert not (tmp_path / "targets").exists()


def test_finished_contexts_need_no_space(shards, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    assert FolderStore(shards.folder, KIND, SIZES, MANIFEST).finished == {0, 1}


def test_finished_results_survive_a_full_disk(tmp_path, monkeypatch):
    store = FolderStore(tmp_path / "targets", KIND, SIZES, MANIFEST)
    fill(store, 1)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        UserError, match=r"targets: the disk is full: 1 of 2 contexts are finished and stay; the same command"
    ):
        fill(store, 0)
    monkeypatch.undo()
    before = (store.folder / "00001" / "score.npy").stat()
    again = FolderStore(store.folder, KIND, SIZES, MANIFEST)
    assert again.finished == {1}
    fill(again, 0)
    assert again.finished == {0, 1}
    after = (store.folder / "00001" / "score.npy").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_an_epoch_has_each_training_position_once(shards):
    features = shards.read()
    assert features.held_out.tolist() == [0, 100, 200, 300, 400]
    assert len(features.training) == 405
    scores = features.take(np.arange(len(features)))["score"]
    rows, updates = 50, 8
    batch_scores = [
        batch["score"] for batch in batches(features, Rows(np.arange(rows), rows, 0), 2 * updates, seed=1)
    ]
    position_of = {tuple(x.ravel()): index for index, x in enumerate(scores)}
    epochs = [
        [position_of[tuple(x.ravel())] for batch in part for x in batch]
        for part in (batch_scores[:updates], batch_scores[updates:])
    ]
    for epoch in epochs:
        assert len(epoch) == len(set(epoch)) == 400
        assert not set(epoch) & set(features.held_out.tolist())
    assert epochs[0] != epochs[1]
    check_positions(len(features), 405)
    with pytest.raises(
        UserError, match="an update takes 406 positions, and there are 405 to train on: lower --batch"
    ):
        check_positions(len(features), 406)


def test_batches_resume_from_their_position(shards):
    reading = batches(shards.read(), Rows(np.arange(50), 50, 0), 10, seed=1)
    for _ in range(3):
        next(reading)
    state, after = json.loads(json.dumps(reading.get_state())), next(reading)
    resumed = batches(shards.read(), Rows(np.arange(50), 50, 0), 10, seed=1)
    resumed.set_state(state)
    np.testing.assert_array_equal(next(resumed)["input"], after["input"])


def test_held_out_rows_are_read_in_batches(shards):
    rows = HeldOut(shards.read())
    parts = list(in_rows(rows, 2))
    assert [count for count, _ in parts] == [2, 2, 1]
    np.testing.assert_array_equal(parts[-1][1]["score"][1], parts[-1][1]["score"][0])
    joined = np.concatenate([batch["score"][:count] for count, batch in parts])
    np.testing.assert_array_equal(joined, rows[0:5]["score"])
