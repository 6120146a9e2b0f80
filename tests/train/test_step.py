"""The update's maths: the paper's schedule, AdamW, the loss, and the same numbers on every mesh."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from kvjax.command.launch import MeshShape
from kvjax.mesh import make_mesh
from kvjax.policies.admission.wgkv import GATE_FLOOR, WriteGateTraining
from kvjax.train.config import TrainConfig
from kvjax.train.data import Rows, to_mesh
from kvjax.train.objective import distillation, student_errors
from kvjax.train.step import initial_state, make_update, optimizer, schedule, trained_method
from tests.tiny_models import filled, tiny_config, tiny_model

CONFIG = TrainConfig(window=4, lambda_=0.3, sequences=5, lr=1e-2, expand=4.0)
MESHES = {"1": {}, "8": {"fsdp": 8}, "4x2": {"fsdp": 4, "tensor": 2}, "2x4": {"fsdp": 2, "tensor": 4}}


def batch(mesh, seed=0, length=24):
    tokens = np.random.default_rng(seed).integers(0, 61, (8, length)).astype(np.int32)
    return to_mesh(mesh, Rows(0, 8, 8), tokens)


@pytest.fixture(scope="module")
def runs():
    """Five updates on each mesh: losses, the state after them, and the state's bytes on each device."""
    found = {}
    for name, shape in MESHES.items():
        mesh = make_mesh(**shape)
        with jax.set_mesh(mesh):
            model = tiny_model()
            state = jax.jit(lambda model=model: initial_state(CONFIG, model.config))()
            update, numbers = make_update(CONFIG), []
            for step in range(5):
                state, values = update(state, model, batch(mesh, step % 4))
                numbers.append({key: float(value) for key, value in values.items()})
            found[name] = (numbers, state)
    return found


@pytest.mark.parametrize("name", ["8", "4x2", "2x4"])
def test_five_steps_are_equal_on_every_mesh(runs, name):
    (alone, state), (numbers, other) = runs["1"], runs[name]
    for mine, theirs in zip(numbers, alone, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    # Adam divides by the gradient's own size, which blows up rounding where a gradient is nearly 0
    for mine, theirs in zip(jax.tree.leaves(other.gates), jax.tree.leaves(state.gates), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=5e-4)


def test_training_lowers_the_loss(runs):
    """The last step sees the first one's tokens again."""
    numbers, _ = runs["1"]
    assert numbers[4]["loss"] < numbers[0]["loss"] - 0.01


@pytest.mark.parametrize("name", MESHES)
def test_each_device_holds_its_part_of_what_is_sharded(runs, name):
    fsdp, tensor = MESHES[name].get("fsdp", 1), MESHES[name].get("tensor", 1)
    _, state = runs[name]
    sharded = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        parts = {axis: axis in jax.tree.leaves(tuple(leaf.sharding.spec)) for axis in ("fsdp", "tensor")}
        held = leaf.addressable_shards[0].data.nbytes
        assert held * (fsdp if parts["fsdp"] else 1) * (tensor if parts["tensor"] else 1) == leaf.nbytes, path
        sharded += leaf.nbytes * parts["fsdp"]
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert sharded > 0.95 * total, "nearly all of the state is split over fsdp"


def test_the_schedule_is_the_papers():
    rate = schedule(7500, 1, 1e-3)
    for update in (0, 1, 400, 749):
        assert float(rate(update)) == pytest.approx(1e-3 * update / 750, rel=1e-6)
    for update in (750, 3000, 7499):
        wanted = 1e-3 * (1 + math.cos(math.pi * (update - 750) / 6750)) / 2
        assert float(rate(update)) == pytest.approx(wanted, rel=1e-4, abs=1e-10)


def test_the_schedule_is_in_sequences():
    """An update has the rate of the sequence that it begins with, whatever the mesh: the paper's own at 0, 8, 16, …"""
    ones, eights = schedule(7500, 1, 1e-3), schedule(7500, 8, 1e-3)
    for update in (0, 1, 93, 94, 500, 937):
        assert float(eights(update)) == pytest.approx(float(ones(8 * update)), rel=1e-6)
    rates = [float(schedule(20, 1, 1.0)(update)) for update in range(20)]
    assert rates[:3] == pytest.approx([0, 0.5, 1])
    assert rates[11] == pytest.approx(0.5)
    assert float(schedule(1, 1, 1.0)(0)) == 0


def test_the_built_in_recipe_has_the_rates_of_200_updates():
    """Bit for bit: w = 20 updates, and a cosine over the other 180."""
    rate = schedule(1600, 8, 5e-3)
    for update in range(200):
        falling = (1 + jnp.cos(jnp.pi * ((jnp.int32(update) - 20) / 180))) / 2
        wanted = 5e-3 * jnp.where(update < 20, jnp.int32(update) / 20, falling)
        assert float(rate(jnp.int32(update))) == float(wanted), update


def test_adamw_by_hand():
    """torch's AdamW: p ← p (1 − lr·wd) − lr · m̂ / (√v̂ + ε), decay on every parameter, lr 0 in the first update."""
    config = TrainConfig(sequences=20, lr=0.1, weight_decay=0.01)
    tx, p, gradients = optimizer(config), jnp.float32(2), [0.5, -0.25, 1.0]
    state, m, v, wanted = tx.init(p), 0.0, 0.0, 2.0
    for i, gradient in enumerate(gradients):
        change, state = tx.update(jnp.float32(gradient), state, p)
        p = p + change
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        step = m / (1 - 0.9 ** (i + 1)) / (math.sqrt(v / (1 - 0.999 ** (i + 1))) + 1e-8)
        lr = 0.1 * i / 2
        wanted = wanted * (1 - lr * 0.01) - lr * step
        assert float(p) == pytest.approx(wanted, rel=1e-5)
    assert float(p) != 2


def method(gates, model, *, window, sparsity="lifetime"):
    return WriteGateTraining(gates, jnp.full(model.config.num_layers, 0.1), window=window, sparsity=sparsity)


@pytest.fixture(scope="module")
def student():
    mesh = make_mesh(fsdp=4, tensor=2)
    with jax.set_mesh(mesh):
        model = tiny_model()
        gates = jax.jit(lambda: initial_state(CONFIG, model.config).gates)()
    return mesh, model, gates


def evaluate(student, *, window, gates=None, sparsity="lifetime", weight=0.5):
    mesh, model, own = student
    with jax.set_mesh(mesh):

        def loss(gates, model, tokens):
            trained = method(gates, model, window=window, sparsity=sparsity)
            return distillation(trained, model, tokens, window=window, weight=jnp.float32(weight))

        return jax.device_get(jax.jit(loss)(own if gates is None else gates, model, batch(mesh)))


def test_a_window_over_everything_leaves_nothing_to_learn(student):
    """WG-KV §12.1: W ≥ N equals full attention, and R = 1."""
    loss, numbers = evaluate(student, window=24)
    assert numbers["distillation"] < 1e-9
    assert numbers["sparsity"] == 1
    assert loss == pytest.approx(0.5)
    assert numbers["kv_size"] == 1


def test_open_gates_equal_full_attention_and_shut_ones_do_not(student):
    mesh, _, gates = student
    with jax.set_mesh(mesh):

        def biased(bias):
            flat = jax.tree.map(jnp.zeros_like, gates)
            flat.b2[...] = flat.b2[...] + bias
            return flat

        opened, shut = biased(30.0), biased(-30.0)
    _, numbers = evaluate(student, window=4, gates=opened)
    assert numbers["distillation"] < 1e-9
    assert numbers["gate"] == pytest.approx(1)
    assert numbers["sparsity"] == pytest.approx(1)
    _, numbers = evaluate(student, window=4, gates=shut)
    assert numbers["distillation"] > 1e-3
    # o_s = min(1, W/(N − s)): what stays is the time spent in the window, and beyond it the gate's floor
    lifetime = np.minimum(1, 4 / np.arange(24, 0, -1)).mean()
    floor = 1 - (1 - GATE_FLOOR) ** 2
    assert numbers["sparsity"] == pytest.approx(lifetime + (1 - lifetime) * floor, rel=1e-5)
    assert numbers["kv_size"] == pytest.approx(4 / 24)
    _, numbers = evaluate(student, window=4, gates=shut, sparsity="paper")
    assert numbers["sparsity"] == pytest.approx(floor, rel=1e-4)


def test_the_loss_is_its_two_terms_and_only_gates_learn(student):
    mesh, model, gates = student
    loss, numbers = evaluate(student, window=4, weight=0.25)
    assert loss == pytest.approx(numbers["distillation"] + 0.25 * numbers["sparsity"], rel=1e-6)
    state = initial_state_on(mesh, model)
    moments = {leaf.shape for leaf in jax.tree.leaves(state.opt) if leaf.ndim}
    assert moments == {leaf.shape for leaf in jax.tree.leaves(gates)}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.gates)} == {"float32"}


def initial_state_on(mesh, model):
    with jax.set_mesh(mesh):
        return jax.jit(lambda: initial_state(CONFIG, model.config))()


def test_gates_begin_alike_on_every_mesh_and_differ_by_seed(student):
    mesh, model, gates = student
    alone = initial_state_on(make_mesh(), tiny_model())
    for mine, theirs in zip(jax.tree.leaves(gates), jax.tree.leaves(alone.gates), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert gates.w1[...].sharding.spec == P(None, "tensor", None, "fsdp")
    other = TrainConfig(window=4, seed=1, expand=4.0)
    with jax.set_mesh(mesh):
        changed = jax.jit(lambda: initial_state(other, model.config).gates)()
    assert not np.array_equal(changed.w1[...], gates.w1[...])


def test_the_optimiser_counts_sequences_and_its_batch_is_rounded_up():
    """Constant gradients: every step of Adam is −lr."""
    config = TrainConfig(mesh=MeshShape(fsdp=8), batch=3, sequences=160, lr=1.0, weight_decay=0.0)
    tx, rate, p = optimizer(config), schedule(160, 8, 1.0), jnp.float32(0)
    state = tx.init(p)
    for update in range(6):
        change, state = tx.update(jnp.float32(1), state, p)
        assert float(change) == pytest.approx(-float(rate(update)), abs=1e-5), update


def test_a_tenth_is_rounded_down():
    assert [float(schedule(25, 1, 1.0)(i)) for i in range(3)] == pytest.approx([0, 0.5, 1])


@pytest.mark.parametrize(("kind", "width"), [("qwen3", 12), ("llama", 32)])
def test_the_gates_width_is_the_papers_for_each_model(kind, width):
    with jax.set_mesh(make_mesh()):
        made = jax.eval_shape(lambda: initial_state(TrainConfig(), tiny_config(model_type=kind)).gates)
    assert made.w1.shape == (3, 4, 16, width)


def test_the_error_is_in_float32():
    with jax.set_mesh(make_mesh()):
        model = filled(tiny_config(), jnp.bfloat16)
        config = TrainConfig(window=4)
        gates = jax.jit(lambda: initial_state(config, model.config).gates)()
        tokens = jnp.zeros((1, 8), jnp.int32)
        squares, _ = student_errors(
            trained_method(config, gates), model, tokens, model.hidden(tokens), window=4
        )
    assert squares.dtype == jnp.float32


def test_shut_soft_gates_see_the_window_that_hard_ones_see(student):
    mesh, model, gates = student
    with jax.set_mesh(mesh):
        flat = jax.tree.map(jnp.zeros_like, gates)
        flat.b2[...] = flat.b2[...] - 30.0
        soft, hard = (
            float(
                distillation(
                    trained_method(CONFIG, flat, hard=hard),
                    model,
                    batch(mesh),
                    window=4,
                    weight=jnp.float32(0),
                )[0]
            )
            for hard in (False, True)
        )
    assert soft == pytest.approx(hard, rel=0.02)
