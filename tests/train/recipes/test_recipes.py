"""Test the rules that every recipe must follow: a new recipe is added to `RECIPES`, with its options for the test-size
model."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.builtin import builtin_model
from kvjax.checkpoints.fingerprint import MadeFor
from kvjax.checkpoints.folder import load_arrays
from kvjax.cli.launch import MeshShape
from kvjax.evaluate.compared import parse_compared
from kvjax.evaluate.config import POLICIES
from kvjax.inference import generate
from kvjax.mesh import make_mesh
from kvjax.models import load_model
from kvjax.policies import make_policy
from kvjax.sampling_params import SamplingParams
from kvjax.struct import leaves_by_path
from kvjax.train import recipes
from kvjax.train.batches import Rows, to_mesh
from kvjax.train.config import parse
from kvjax.train.recipes import find_recipe
from kvjax.train.run import train
from kvjax.train.update import initial_state, make_update, param_dtypes
from kvjax.train.validation import make_validate
from tests.tiny_models import filled, tiny_config, tiny_model
from tests.train.recipes.whole_model import WholeModel
from tests.train.short_run import stopping_after

RECIPES = {
    "wgkv": {"window": 8, "lambda": 0.3, "lr": 1e-2},
    "fast_kvzip": {"contexts": 4, "targets": "disk", "dim": 4, "sinks": 4},
    "kvzap": {"contexts": 4, "targets": "disk", "hidden": 6},
    "kvpop": {
        "phase": "sparsify",
        "uptrained": builtin_model("test_model"),
        "max_entries": 16,
        "window": 6,
        "sink": 2,
    },
    "prulong": {"window": 8, "sink": 2, "block": 1, "lr": 0.1, "start": 0.0},
    "duo_attention": {"window": 8, "sink": 2, "block": 1, "lr": 0.2},
    "tests.probes.hidden_gate:HiddenGates": {"entries": 8, "every": 4},
    "tests.train.recipes.whole_model:WholeModel": {"window": 8},
}
USED = {"fast_kvzip": {"ratio": 0.3}, "kvzap": {"ratio": 0.3}}
"""Arguments that policies with a budget need in addition to those of `deploy`."""


def each_method(*thorough):
    """Parametrize a test by recipe; the given ones run only in the thorough tests."""
    marked = [pytest.param(x, marks=pytest.mark.thorough if x in thorough else ()) for x in RECIPES]
    return pytest.mark.parametrize("method", marked)


def make_recipe(method, **changes):
    options = {{"lambda": "lambda_"}.get(name, name): value for name, value in RECIPES[method].items()}
    options = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    fields = dict(lengths=(32,), shares=(1.0,), sequences=24, batch=8) | options | changes
    return find_recipe(method)(method=method, **fields)


def batch_of(recipe, model, seed):
    """Return the batch of an update's loss: from sampled sequences or, if the recipe has rows of its own, sampled
    rows."""
    random = np.random.default_rng(seed)
    if model is not None and (row := recipe.row(model, 32)) is not None:
        return {name: sample_array(random, name, (8, *x.shape), x.dtype) for name, x in row.items()}
    tokens = random.integers(0, 61, (8, 32)).astype(np.int32)
    return next(recipe.batches(iter([tokens]), model))


def sample_array(random, name, shape, dtype):
    """Return tokens, documents that rise within each row, labels, or numbers from 0 to 1."""
    if name == "document":
        return np.sort(random.integers(0, 3, shape), -1).astype(dtype)
    if np.issubdtype(dtype, np.integer):
        return random.integers(0, 61, shape).astype(dtype)
    numbers = random.uniform(size=shape)
    return numbers < 0.5 if np.issubdtype(dtype, np.bool_) else numbers.astype(dtype)


def updates(recipe, mesh, count=4):
    """Return the logged numbers of `count` updates of the tiny model, and the state after them. The fourth shows the
    masks after the third, the first update in which PruLong's multipliers are not 0."""
    numbers = []
    with jax.set_mesh(mesh):
        model = tiny_model()
        state = jax.jit(lambda model: initial_state(recipe, model))(model)
        update, loaded = make_update(recipe), None if recipe.takes_model else model
        for step in range(count):
            batch = to_mesh(mesh, Rows(np.arange(8), 8, 0), batch_of(recipe, loaded, step))
            state, scalars = update(state, loaded, batch, np.int32(step))
            numbers.append({name: float(value) for name, value in scalars.items()})
    return numbers, state


@functools.cache
def on_one_device(method):
    """Return the numbers on one device."""
    return updates(make_recipe(method), make_mesh())[0]


@pytest.mark.mesh
@pytest.mark.thorough
@each_method(*(method for method in RECIPES if method != "wgkv"))
def test_splitting_sequences_over_a_mesh_changes_no_number(method):
    compare_on(make_mesh(fsdp=8), method)


@pytest.mark.mesh
@pytest.mark.thorough
@pytest.mark.parametrize("method", RECIPES)
def test_splitting_sequences_and_heads_changes_no_number(method):
    compare_on(make_mesh(fsdp=2, tensor=4), method)


def compare_on(mesh, method):
    """Check that updates on this mesh have the numbers of those on one device."""
    for actual, expected in zip(updates(make_recipe(method), mesh)[0], on_one_device(method), strict=True):
        assert actual == pytest.approx(expected, rel=2e-5, abs=1e-7)
    assert on_one_device(method)[0]["loss"] != on_one_device(method)[2]["loss"]


@pytest.mark.slow
@each_method(*(method for method in RECIPES if method != "prulong"))
def test_an_accumulated_update_has_the_same_numbers(method):
    parts, _ = updates(make_recipe(method, accumulate=4), make_mesh(fsdp=2))
    for actual, expected in zip(parts, on_one_device(method), strict=True):
        assert actual == pytest.approx(expected, rel=2e-5, abs=1e-7)


@pytest.mark.thorough
def test_every_update_has_new_samples():
    """Parameters and batch are constant, so only the samples differ."""
    recipe, mesh = make_recipe("prulong", lr=0.0, multiplier_lr=0.0), make_mesh()
    with jax.set_mesh(mesh):
        model = tiny_model()
        state = jax.jit(lambda model: initial_state(recipe, model))(model)
        update, batch, losses = (
            make_update(recipe),
            to_mesh(mesh, Rows(np.arange(8), 8, 0), batch_of(recipe, model, 0)),
            [],
        )
        for step in (0, 0, 1):
            state, numbers = update(state, model, batch, np.int32(step))
            losses.append(float(numbers["cross_entropy"]))
    assert losses[0] == losses[1] != pytest.approx(losses[2], rel=1e-6)


def arguments(method, folder, *more):
    options = [text for name, value in RECIPES[method].items() for text in (f"--{name}", str(value))]
    return [
        *(
            "--method",
            method,
            "--model",
            str(builtin_model("test_model")),
            "--dtype",
            "float32",
            "--mesh",
            "2",
        ),
        *("--lengths", "64", "--shares", "1", "--batch", "4", "--sequences", "16", "--checkpoint-every", "1"),
        *("--validation", "2", "--report", "none", "--out", str(folder), *options, *more),
    ]


class Stopped(Exception):
    pass


@pytest.mark.thorough
@pytest.mark.parametrize("method", RECIPES)
def test_a_stopped_run_ends_like_an_uninterrupted_one(method, tmp_path, monkeypatch):
    """The run is stopped after three of its four updates. The test also reads the export."""
    uninterrupted = train(parse(arguments(method, tmp_path / "whole")))
    with monkeypatch.context() as patched:
        patched.setattr("kvjax.train.run.make_update", stopping_after(3, Stopped))
        with pytest.raises(Stopped):
            train(parse(arguments(method, tmp_path / "run")))
    resume_args = ["--resume", "--method", method, "--out", str(tmp_path / "run"), "--mesh", "2"]
    resumed = train(parse(resume_args))
    for actual, expected in zip(
        *(jax.tree.leaves((x.params, x.model)) for x in (resumed, uninterrupted)), strict=True
    ):
        np.testing.assert_array_equal(actual, expected)
    assert resumed.validation.numbers == uninterrupted.validation.numbers
    if method in recipes.RECIPES:  # resume once more, with nothing left to do
        ended = train(parse(resume_args))
        for actual, expected in zip(
            jax.tree.leaves(ended.params), jax.tree.leaves(uninterrupted.params), strict=True
        ):
            np.testing.assert_array_equal(actual, expected)

    recipe, exported = (
        parse(arguments(method, tmp_path / "other")),
        uninterrupted.folder / type(make_recipe(method)).exports,
    )
    described = json.loads((exported / "config.json").read_text())
    used = str(exported / "model") if (exported / "model").is_dir() else recipe.model
    assert described["method"] == method
    assert MadeFor.described(described) == MadeFor.of(uninterrupted.model, used)
    used_as = recipe.used_as
    if used_as == method:
        from_folder = load_arrays(exported)
        params = {name.removesuffix(".value"): x for name, x in leaves_by_path(uninterrupted.params).items()}
        assert from_folder.keys() == params.keys()
        for name, actual in params.items():
            np.testing.assert_array_equal(from_folder[name], actual)
    tokens = np.random.default_rng(0).integers(4, 60, 40)
    with jax.set_mesh(uninterrupted.mesh):
        model = load_model(used, dtype="float32")
        policy = make_policy({used_as: USED.get(method, {})}, gates=exported, model=model)
        deployed = recipe.deploy(uninterrupted.params, uninterrupted.model)
        from_folder, from_run = (
            generate(used_model, [tokens, tokens], SamplingParams(max_new_tokens=8), policy=used_policy)
            for used_model, used_policy in ((model, policy), (uninterrupted.model, deployed))
        )
    np.testing.assert_array_equal(from_folder.tokens[0], from_run.tokens[0])
    assert from_folder.stats.kv_ratio == pytest.approx(from_run.stats.kv_ratio)


@pytest.mark.parametrize("method", recipes.RECIPES)
def test_the_suggested_comparison_uses_the_trained_gates(method):
    """Policies that do not read its folder would be the wrong ones."""
    options = make_recipe(method).evaluate_options(Path("here"))
    if options[-1] == "head_pattern:gates=here":
        return
    assert options[-2:] == ("--gates", "here")
    assert any(
        parse_compared(text).gated_method == make_recipe(method).used_as for text in options[1:-2] or POLICIES
    )


def test_every_recipe_is_tested():
    assert set(recipes.RECIPES) <= set(RECIPES)


@pytest.mark.slow
@each_method("duo_attention", "kvpop", "prulong", "fast_kvzip")
def test_frozen_arrays_do_not_change(method):
    """An update changes the trained parameters, which do not include a frozen model's weights."""
    recipe = make_recipe(method)
    with jax.set_mesh(make_mesh()):
        model = tiny_model()
        before = jax.device_get(jax.tree.leaves(model))
        state = jax.jit(lambda model: initial_state(recipe, model))(model)
        params = jax.device_get(jax.tree.leaves(state.params))
        loaded = None if recipe.takes_model else model
        batch = to_mesh(make_mesh(), Rows(np.arange(8), 8, 0), batch_of(recipe, loaded, 0))
        if recipe.split(state.params)[1] is None:
            random_params = [x for x in params if np.ptp(x)]  # the ones of a norm may be equal by chance
            assert not [
                x for x in random_params for y in before if x.shape == y.shape and np.array_equal(x, y)
            ]
        for step in range(2):  # the first update may have a rate of 0
            state, _ = make_update(recipe)(state, loaded, batch, np.int32(step))
    for actual, expected in zip(jax.tree.leaves(model), before, strict=True):
        np.testing.assert_array_equal(actual, expected)
    changed = [np.any(x != y) for x, y in zip(jax.tree.leaves(state.params), params, strict=True)]
    assert any(changed)


def test_held_out_sequences_are_measured_one_by_one_by_default():
    """A loss is a mean over its batch, and a sequence's figures must not depend on the mesh."""
    rows = [np.random.default_rng(seed).integers(0, 61, 32).astype(np.int32) for seed in range(3)]
    validations = []
    for shape in (MeshShape(), MeshShape(fsdp=8)):
        recipe = make_recipe("tests.train.recipes.whole_model:WholeModel", mesh=shape)
        mesh = make_mesh(shape.data, shape.fsdp, shape.tensor)
        with jax.set_mesh(mesh):
            model = tiny_model()
            state = jax.jit(lambda model, recipe=recipe: initial_state(recipe, model))(model)
            validations.append(make_validate(recipe, mesh, rows)(state, None))
    assert validations[0].numbers == pytest.approx(validations[1].numbers, rel=2e-5)
    assert [x.sequences for x in validations] == [3, 3]


@pytest.mark.mesh
def test_a_trained_model_its_gradients_and_its_moments_are_split():
    """Each of 8 devices has an eighth of parameters and moments, except arrays that are too small to split."""
    recipe, mesh = make_recipe("tests.train.recipes.whole_model:WholeModel"), make_mesh(fsdp=8)
    _, state = updates(recipe, mesh, count=1)
    leaves = jax.tree.leaves(state)
    total = sum(x.nbytes for x in leaves)
    first_device = sum(x.addressable_shards[0].data.nbytes for x in leaves)
    assert total / 8 <= first_device < 1.15 * total / 8
    with jax.set_mesh(mesh):
        loss = functools.partial(recipe.loss, frozen=None, key=jax.random.key(0), step=0)
        batch = to_mesh(mesh, Rows(np.arange(8), 8, 0), np.zeros((8, 32), np.int32))
        gradients = jax.eval_shape(jax.grad(lambda params: loss(params, batch=batch)[0]), state.params)
    for gradient, param in zip(jax.tree.leaves(gradients), jax.tree.leaves(state.params), strict=True):
        assert gradient.sharding.spec == param.sharding.spec


@pytest.mark.slow
def test_master_weights_keep_updates_that_bfloat16_would_lose():
    """Steps of a thousandth of a bfloat16's last place add up; the loss sees rounded weights."""
    method, mesh = "tests.train.recipes.whole_model:WholeModel", make_mesh()
    ends = {}
    for master_weights in (False, True):
        recipe = make_recipe(method, lr=1e-5, master_weights=master_weights)
        with jax.set_mesh(mesh):
            model = filled(tiny_config(), jnp.bfloat16)
            first = np.asarray(model.layers.down[...], np.float32)
            dtypes = param_dtypes(recipe, model)
            state = jax.jit(lambda model, recipe=recipe: initial_state(recipe, model))(model)
            tokens = jnp.asarray(np.random.default_rng(0).integers(0, 61, (8, 32)), jnp.int32)
            update = make_update(recipe, dtypes)
            for step in range(4):
                state, _ = update(state, None, tokens, np.int32(step))
        weights = state.params["model"].layers.down[...]
        assert weights.dtype == (jnp.float32 if master_weights else jnp.bfloat16)
        ends[master_weights] = np.mean(np.asarray(weights, np.float32) != first)
    assert ends[True] > 0.99
    assert ends[False] < 0.5


@pytest.mark.thorough
@pytest.mark.parametrize("more", [(), ("--master-weights",)])
def test_a_run_in_bfloat16_and_in_parts_is_resumed_exactly(more, tmp_path):
    """Moments keep their dtypes, so that a checkpoint holds exactly the results of the update."""
    method, options = (
        "tests.train.recipes.whole_model:WholeModel",
        ("--dtype", "bfloat16", "--accumulate", "2", *more),
    )
    uninterrupted = train(parse(arguments(method, tmp_path / "whole", *options)))
    args = arguments(method, tmp_path / "run", *options)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("kvjax.train.run.make_update", stopping_after(2, Stopped))
        with pytest.raises(Stopped):
            train(parse(args))
    resumed = train(parse(["--resume", "--method", method, "--out", str(tmp_path / "run")]))
    for actual, expected in zip(
        jax.tree.leaves(resumed.model), jax.tree.leaves(uninterrupted.model), strict=True
    ):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("name", ["loss", "step", "tokens_per_second"])
def test_a_scalar_with_a_reserved_name_is_refused(name):
    class Misnamed(WholeModel):
        def loss(self, params, frozen, batch, key, step):
            return jnp.float32(0), {name: 1.0}

    recipe, refused = Misnamed(), f"Misnamed.loss: '{name}' is reserved by the log"
    with jax.set_mesh(make_mesh()):
        state = jax.eval_shape(lambda: initial_state(recipe, tiny_model()))
    with jax.set_mesh(make_mesh()), pytest.raises(ValueError, match=refused):
        jax.eval_shape(make_update(recipe), state, None, np.zeros((1, 8), np.int32), np.int32(0))


@dataclasses.dataclass(frozen=True)
class TwoAtOnce(WholeModel):
    """A recipe that makes one batch from the sequences of two updates."""

    def batches(self, sequences, model):
        for first in sequences:
            yield np.maximum(first, next(sequences))


def test_a_batch_from_more_than_one_update_is_refused(tmp_path):
    recipe = TwoAtOnce(
        **dataclasses.asdict(parse(arguments("tests.train.recipes.whole_model:WholeModel", tmp_path)))
    )
    with pytest.raises(
        ValueError, match="TwoAtOnce.batches must take the sequences of one update .* those of 2"
    ):
        train(dataclasses.replace(recipe, mesh=MeshShape(fsdp=2)))
