"""Test the training loop: where the data of a resumed run goes on, and what a run says first."""

import dataclasses
import functools
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils

from kvjax.errors import UserError
from kvjax.mesh import make_mesh
from kvjax.train.checkpoints import Checkpoints
from kvjax.train.config import parse
from kvjax.train.loop import Run, check_resumed, plan
from kvjax.train.recipes.wgkv import WriteGates
from kvjax.train.update import TrainState
from tests.tiny_models import tiny_model


def resuming(notes, group, groups):
    """Return the position at which a run resumes from a checkpoint with these notes."""
    places, mesh, state = [], make_mesh(), TrainState(None, None)
    recipe = WriteGates(resume=True, window=4, expand=4.0)
    checkpoints = SimpleNamespace(
        latest=lambda: 3, notes=lambda step: {"data": notes}, restore=lambda step, like: state
    )
    with jax.set_mesh(mesh):
        run = SimpleNamespace(
            recipe=recipe,
            mesh=mesh,
            rows=SimpleNamespace(group=group, groups=groups),
            checkpoints=checkpoints,
            data=SimpleNamespace(sequences=SimpleNamespace(set_state=places.append)),
        )
        run.restore = functools.partial(Run.restore, run)
        assert Run.begin(run, tiny_model())[1] == 3
    return places


def test_each_process_resumes_from_its_own_position():
    assert resuming(["a", "b"], 1, 2) == ["b"]
    assert resuming(["a", "a"], 0, 1) == ["a"]


def test_a_run_on_documents_resumes_with_as_many_processes(tmp_path):
    """A built-in run and a finished run may have others."""
    with Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(3, {"x": jnp.zeros(1)}, {"data": [{"next": 8}]})
    recipe = WriteGates(data="documents/")
    check_resumed(recipe, tmp_path, 1)
    with pytest.raises(UserError, match="as many processes that have their own rows: got 2, expected 1"):
        check_resumed(recipe, tmp_path, 2)
    check_resumed(dataclasses.replace(recipe, data="builtin"), tmp_path, 2)
    check_resumed(dataclasses.replace(recipe, sequences=3), tmp_path, 2)


def test_positions_are_ordered_by_group(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    other = np.frombuffer(json.dumps([0, {"next": 12}]).encode(), np.uint8)

    def allgather(x):
        if np.ndim(x) == 0:
            return np.array([int(x), other.size])
        size = max(len(x), other.size)
        return np.stack([np.pad(r, (0, size - len(r)), constant_values=ord(" ")) for r in (x, other)])

    monkeypatch.setattr(multihost_utils, "process_allgather", allgather)
    rows = SimpleNamespace(group=1, groups=2)
    data = SimpleNamespace(sequences=SimpleNamespace(get_state=lambda: {"next": 7}))
    assert Run.positions(SimpleNamespace(rows=rows, data=data)) == [{"next": 12}, {"next": 7}]


def test_the_plan_says_if_the_mesh_rounds_the_batch_up():
    config = parse(["--config", "llama-3.1-8b", "--mesh", "8"])
    assert plan(config, 0, 65_536_000, 1234) == (
        "1,234 parameters, 7,504 sequences, 65,536,000 tokens in all: 938 updates of 8, not 1: the mesh splits a batch "
        "into 8 (its axes `tensor` and `sequence` do not)"
    )
    builtin = parse(["--mesh", "8"])
    assert (builtin.steps, builtin.rows) == (200, 8)
    assert plan(builtin, 50, 512_000, 10) == (
        "10 parameters, 1,600 sequences, 512,000 tokens in all: 200 updates of 8; going on with update 51"
    )
