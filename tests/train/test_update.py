"""Test the update of write gates: the same numbers on every mesh, and the placement of its state."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kvjax.mesh import P, make_mesh
from kvjax.train.metrics import FINITE
from kvjax.train.recipe import Recipe
from kvjax.train.update import initial_state, make_update
from tests.tiny_models import tiny_model
from tests.train.write_gates import CONFIG, batch

MESHES = {"1": {}, "8": {"fsdp": 8}, "4x2": {"fsdp": 4, "tensor": 2}, "2x4": {"fsdp": 2, "tensor": 4}}


@pytest.fixture(scope="module")
def updated():
    """Return a function from a mesh's name to the numbers of five updates, and the state after them."""

    @functools.cache
    def on(name):
        mesh = make_mesh(**MESHES[name])
        with jax.set_mesh(mesh):
            model = tiny_model()
            state = jax.jit(lambda model: initial_state(CONFIG, model))(model)
            update, numbers = make_update(CONFIG), []
            for step in range(5):
                state, values = update(state, model, batch(mesh, step % 4), np.int32(step))
                numbers.append({key: float(value) for key, value in values.items()})
        return numbers, state

    return on


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["8", "4x2", "2x4"])
def test_five_steps_are_equal_on_every_mesh(updated, name):
    (expected_numbers, state), (numbers, mesh_state) = updated("1"), updated(name)
    for actual, expected in zip(numbers, expected_numbers, strict=True):
        assert actual == pytest.approx(expected, rel=1e-5)
    # Adam divides by the gradient's own size, which amplifies rounding where a gradient is nearly 0
    for actual, expected in zip(
        jax.tree.leaves(mesh_state.params), jax.tree.leaves(state.params), strict=True
    ):
        np.testing.assert_allclose(actual, expected, atol=5e-4)


def test_training_lowers_the_loss(updated):
    """The last step sees the first one's tokens again."""
    numbers, _ = updated("1")
    assert numbers[4]["loss"] < numbers[0]["loss"] - 0.01


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks={"1": (), "4x2": pytest.mark.mesh}.get(x, pytest.mark.thorough)) for x in MESHES],
)
def test_each_device_holds_its_part_of_sharded_arrays(updated, name):
    fsdp, tensor = MESHES[name].get("fsdp", 1), MESHES[name].get("tensor", 1)
    _, state = updated(name)
    sharded = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        parts = {axis: axis in jax.tree.leaves(tuple(leaf.sharding.spec)) for axis in ("fsdp", "tensor")}
        first_device = leaf.addressable_shards[0].data.nbytes
        assert (
            first_device * (fsdp if parts["fsdp"] else 1) * (tensor if parts["tensor"] else 1) == leaf.nbytes
        ), path
        sharded += leaf.nbytes * parts["fsdp"]
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert sharded > 0.95 * total, "nearly all of the state is split over fsdp"


def test_the_logged_loss_is_that_of_the_first_parameters(updated):
    """`make_update` adds it to the recipe's scalars."""
    (first, *_), _ = updated("1")
    assert first["loss"] == pytest.approx(
        first["distillation"] + CONFIG.lambda_ * first["sparsity"], rel=1e-6
    )


@dataclasses.dataclass(frozen=True)
class TwoGroups(Recipe):
    """A recipe with large gradients, in which one group takes steps of length 1 and the other of length 1/100."""

    def init(self, model):
        spread = jnp.arange(1.0, 17).reshape(4, 4)
        return {"fast": jax.sharding.reshard(spread, P("fsdp", "tensor")), "slow": -spread[:, 0]}

    def loss(self, params, frozen, batch, key, step):
        return 1e3 * jnp.sum(params["fast"] ** 2) + 1e5 * jnp.sum(params["slow"] ** 2), {}

    def optimizer(self):
        groups = {
            name: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(rate))
            for name, rate in {"fast": 1.0, "slow": 0.01}.items()
        }
        return optax.multi_transform(groups, {"fast": "fast", "slow": "slow"})

    def deploy(self, params, model):
        raise NotImplementedError


@pytest.mark.parametrize("name", ["1", "4x2"])
def test_groups_have_their_own_rates_and_are_clipped_separately(name):
    recipe, mesh = TwoGroups(), make_mesh(**MESHES[name])
    with jax.set_mesh(mesh):
        model = tiny_model()
        state = jax.jit(lambda model: initial_state(recipe, model))(model)
        before = jax.device_get(state.params)
        state, _ = make_update(recipe)(state, model, batch(mesh), np.int32(0))
    for group, rate in {"fast": 1.0, "slow": 0.01}.items():
        down = before[group] / np.linalg.norm(before[group])
        np.testing.assert_allclose(before[group] - state.params[group], rate * down, rtol=1e-3)


@dataclasses.dataclass(frozen=True)
class Steep(TwoGroups):
    """A loss with a finite gradient if `at` is 1. At 0 it is the gradient of a square root, which is not finite."""

    at: float = 1.0

    def loss(self, params, frozen, batch, key, step):
        square = self.at * jnp.sum(params["slow"]) + 0 * jnp.sum(params["fast"])
        return 0 * jnp.sum(batch) + jnp.sqrt(square**2), {}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("at", "finite"), [(1.0, True), (0.0, False)])
def test_an_update_says_whether_its_gradients_are_finite(at, finite, accumulate):
    recipe, mesh = Steep(at=at, accumulate=accumulate), make_mesh(fsdp=2, tensor=2)
    with jax.set_mesh(mesh):
        model = tiny_model()
        state = jax.jit(lambda model: initial_state(recipe, model))(model)
        _, numbers = make_update(recipe)(state, model, batch(mesh), np.int32(0))
    assert jnp.isfinite(numbers["loss"])
    assert bool(numbers[FINITE]) == finite
