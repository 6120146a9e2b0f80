"""Test training on a mesh that splits the tokens of a sequence: the numbers are the same, with a fraction of the
memory."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.builtin import builtin_model
from kvjax.errors import UserError
from kvjax.mesh import make_mesh
from kvjax.train.batches import Rows, to_mesh
from kvjax.train.config import parse
from kvjax.train.recipes.duo_attention import DuoAttention
from kvjax.train.recipes.kvpop import ConstantCache
from kvjax.train.recipes.prulong import PruLong
from kvjax.train.recipes.wgkv import WriteGates
from kvjax.train.run import train
from kvjax.train.update import initial_state, make_update
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.mesh

MESHES = {
    "2": {"sequence": 2},
    "2x2x2": {"fsdp": 2, "tensor": 2, "sequence": 2},
    "replicas": {"fsdp": 2, "tensor": 2, "replica": 2},
}
each_mesh = pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(axes, marks=() if name == "2x2x2" else pytest.mark.thorough)
        for name, axes in MESHES.items()
    ],
    ids=MESHES,
)
KVPOP = {"max_entries": 14, "sink": 2, "window": 6, "batch": 8}
RECIPES = {
    "wgkv": WriteGates(window=4, lambda_=0.3, sequences=5, expand=4.0),
    "uptrain": ConstantCache(phase="uptrain", **KVPOP),
    "sparsify": ConstantCache(phase="sparsify", **KVPOP),
    "prulong": PruLong(sink=2, window=6, block=2, start=0.0, frozen_model=False),
    "duo_attention": DuoAttention(sink=2, window=6, block=2),
}
PACKED = "prulong", "duo_attention"
"""Recipes that distinguish documents."""


def sample_batch(mesh, length, rows=8, *, packed=False):
    """Return tokens. If packed, one document begins at the border between two devices, and one crosses it."""
    tokens = np.random.default_rng(0).integers(0, 61, (rows, length)).astype(np.int32)
    document = np.searchsorted([7, 16, 29], np.arange(length), "right")[None].repeat(rows, 0)
    labelled = np.pad(document[:, 1:] == document[:, :-1], ((0, 0), (1, 0)))
    batch = {"tokens": tokens, "document": document.astype(np.int32), "labelled": labelled}
    return to_mesh(mesh, Rows(np.arange(rows), rows, 0), batch if packed else tokens)


def assert_close(actual_tree, expected_tree):
    """Compare gradients, each relative to its largest number; some are 0 except for rounding."""
    for actual, expected in zip(jax.tree.leaves(actual_tree), jax.tree.leaves(expected_tree), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5 * np.abs(expected).max() + 1e-8)


def initial_params(name, model):
    """Return the first parameters of a recipe. PruLong's multipliers and DuoAttention's α are replaced: at 0 the
    constraint has no gradient, and at 1 there is nothing to distil."""
    params = RECIPES[name].init(model)
    if name == "prulong":
        params["multipliers"] = jnp.asarray([0.7, 0.4])
    if name == "duo_attention":
        params["alpha"] = jax.random.uniform(jax.random.key(1), params["alpha"].shape)
    return params


@functools.cache
def gradient(name, **shape):
    """Return the loss of a recipe, its logged numbers, and the gradients of its parameters."""
    recipe, mesh = RECIPES[name], make_mesh(**shape)
    with jax.set_mesh(mesh):
        model = tiny_model()
        params = jax.jit(lambda model: initial_params(name, model))(model)

        @jax.jit
        def run(params, model, tokens):
            loss = functools.partial(recipe.loss, batch=tokens, key=jax.random.key(0), step=jnp.int32(5))
            return jax.value_and_grad(lambda params: loss(params, model), has_aux=True)(params)

        return jax.device_get(run(params, model, sample_batch(mesh, 32, packed=name in PACKED)))


@each_mesh
@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x == "sparsify" else pytest.mark.thorough) for x in RECIPES],
)
def test_losses_and_gradients_match_one_device(name, mesh, monkeypatch):
    """Each device computes the loss for parts of its own tokens."""
    monkeypatch.setattr("kvjax.train.objective.TOKENS_AT_ONCE", 6)
    ((loss, figures), gradients), ((expected_loss, expected_figures), expected_gradients) = (
        gradient(name, **mesh),
        gradient(name),
    )
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert {name: float(x) for name, x in figures.items()} == pytest.approx(
        {name: float(x) for name, x in expected_figures.items()}, rel=1e-5
    )
    assert_close(gradients, expected_gradients)
    assert max(np.abs(x).max() for x in jax.tree.leaves(expected_gradients)) > 1e-3


def temporaries(name, length, **shape):
    """Return the bytes of temporaries per device in an update of one sequence, without inputs and outputs."""
    recipe, mesh = RECIPES[name], make_mesh(**shape)
    with jax.set_mesh(mesh):
        model = tiny_model()
        state = jax.jit(lambda model: initial_state(recipe, model))(model)
        loaded = None if recipe.takes_model else model
        update = make_update(recipe).lower(
            state, loaded, sample_batch(mesh, length, 1, packed=name in PACKED), np.int32(0)
        )
        return update.compile().memory_analysis().temp_size_in_bytes


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("wgkv", 0.28),
        ("uptrain", 0.3),
        ("sparsify", 0.38),
        ("prulong", 0.28),
        ("duo_attention", 0.28),
    ],
)
def test_four_devices_take_about_a_quarter_of_the_memory_each(name, limit):
    """The shares are 0.251, 0.284, 0.364, 0.260 and 0.261. KVPOP's score loss goes head by head, and each device then
    has one of the four heads, which takes as much."""
    assert temporaries(name, 2048, sequence=4) < limit * temporaries(name, 2048)


ARGS = [
    *("--model", str(builtin_model("test_model")), "--data", "builtin", "--lengths", "64", "--shares", "1"),
    *("--batch", "2", "--window", "8", "--lambda", "0.3", "--lr", "1e-2", "--sequences", "12"),
    *("--checkpoint-every", "2", "--report", "none", "--dtype", "float32"),
]


def logged(run):
    """Return the losses of a run's updates, and its last validation."""
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line], run.validation.numbers


@pytest.mark.thorough
def test_a_run_ends_as_on_one_device_and_resumes_on_another_mesh(tmp_path):
    runs = {
        mesh: train(parse([*ARGS, "--mesh", mesh, "--out", str(tmp_path / mesh)]))
        for mesh in ("1", "sequence=2")
    }
    on_one_device, split = (logged(run) for run in runs.values())
    assert len(on_one_device[0]) == 6
    assert split[0] == pytest.approx(on_one_device[0], rel=1e-5)
    assert split[1] == pytest.approx(on_one_device[1], rel=1e-4)
    folder = runs["sequence=2"].folder
    shutil.rmtree(folder / "checkpoints" / "6")
    resumed = train(parse(["--resume", "--out", str(folder), "--mesh", "fsdp=2,tensor=2,sequence=2"]))
    assert dict(resumed.mesh.shape) == {"data": 1, "fsdp": 2, "tensor": 2, "sequence": 2, "replica": 1}
    losses, validation = logged(resumed)
    assert losses == pytest.approx(on_one_device[0], rel=1e-5)
    assert validation == pytest.approx(on_one_device[1], rel=1e-4)


@pytest.mark.thorough
def test_features_and_gates_match_one_device(tmp_path):
    """The method is Fast KVzip: the split model reads and repeats contexts, and reads questions with answers after
    them. The gates then train on positions, split by heads."""
    args = [
        *("--method", "fast_kvzip", *ARGS[:4], "--dtype", "float32", "--lengths", "64", "--shares", "1"),
        *(
            "--contexts",
            "4",
            "--batch",
            "32",
            "--sequences",
            "128",
            "--checkpoint-every",
            "4",
            "--validation",
            "1",
        ),
        *("--report", "none", "--targets", "memory", "--target", "both"),
    ]
    on_one_device, split = (
        logged(train(parse([*args, "--mesh", mesh, "--out", str(tmp_path / mesh)])))
        for mesh in ("1", "fsdp=2,sequence=2")
    )
    assert len(on_one_device[0]) == 4
    assert split[0] == pytest.approx(on_one_device[0], rel=1e-5)
    assert split[1] == pytest.approx(on_one_device[1], rel=1e-4)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--mesh", "sequence=4", "--lengths", "62", "64"],
            "--lengths 62: --mesh sequence=4 splits the tokens of a",
        ),
        (
            ["--mesh", "tensor=3,sequence=2"],
            "tensor × sequence has size 6, which does not divide the model's kv heads (4)",
        ),
        (
            ["--mesh", "sequences=4"],
            "mesh 'sequences=4': expected 8 (fsdp), 4x2 (fsdp × tensor) or fsdp=4,tensor=2",
        ),
    ],
)
def test_a_mesh_that_does_not_fit_the_run_is_an_error_of_one_line(args, message, tmp_path, monkeypatch):
    """The error comes before weights are read."""
    monkeypatch.setattr("kvjax.train.run.load_model", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(UserError) as error:
        train(parse([*ARGS, "--out", str(tmp_path / "run"), *args]))
    assert message in str(error.value)
