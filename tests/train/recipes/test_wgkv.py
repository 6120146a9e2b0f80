"""Test the maths of write gates' training: the paper's schedule, AdamW, the loss, the held-out loss of the deployed
gates, and the files of a run."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from kvjax.checkpoints.folder import describe
from kvjax.cli.launch import MeshShape
from kvjax.inference.allocation import empty_cache
from kvjax.inference.forward import forward
from kvjax.mesh import HEADS, make_mesh
from kvjax.policies import make_policy
from kvjax.policies.admission.wgkv import GATE_FLOOR
from kvjax.train.objective import student_errors
from kvjax.train.recipe import Validation
from kvjax.train.recipes.wgkv import WriteGates, warmup_cosine
from kvjax.train.update import initial_state
from tests.tiny_models import tiny_gates, tiny_model
from tests.train.write_gates import CONFIG, TAU, WINDOW, batch, held_out, validated


def test_the_schedule_matches_the_paper():
    rate = warmup_cosine(7500, 1, 1e-3)
    for update in (0, 1, 400, 749):
        assert float(rate(update)) == pytest.approx(1e-3 * update / 750, rel=1e-6)
    for update in (750, 3000, 7499):
        expected = 1e-3 * (1 + math.cos(math.pi * (update - 750) / 6750)) / 2
        assert float(rate(update)) == pytest.approx(expected, rel=1e-4, abs=1e-10)


def test_the_schedule_counts_sequences():
    """An update has the rate of its first sequence, whatever the mesh: the paper's rates at sequences 0, 8, 16 and so
    on."""
    ones, eights = warmup_cosine(7500, 1, 1e-3), warmup_cosine(7500, 8, 1e-3)
    for update in (0, 1, 93, 94, 500, 937):
        assert float(eights(update)) == pytest.approx(float(ones(8 * update)), rel=1e-6)
    rates = [float(warmup_cosine(20, 1, 1.0)(update)) for update in range(20)]
    assert rates[:3] == pytest.approx([0, 0.5, 1])
    assert rates[11] == pytest.approx(0.5)
    assert float(warmup_cosine(8, 8, 1.0)(0)) == 1, "a single update has the peak"


def test_the_warmup_is_rounded_down():
    assert [float(warmup_cosine(25, 1, 1.0)(i)) for i in range(3)] == pytest.approx([0, 0.5, 1])


def test_the_built_in_recipe_has_the_rates_of_200_updates():
    """The rates are equal bit for bit: w = 20 updates, and a cosine over the other 180."""
    rate = warmup_cosine(1600, 8, 5e-3)
    for update in range(200):
        falling = (1 + jnp.cos(jnp.pi * ((jnp.int32(update) - 20) / 180))) / 2
        expected = 5e-3 * jnp.where(update < 20, jnp.int32(update) / 20, falling)
        assert float(rate(jnp.int32(update))) == float(expected), update


def test_adamw_by_hand():
    """The formula is torch's: p ← p (1 − lr·wd) − lr · m̂ / (√v̂ + ε), decay on every parameter, lr 0 in the first
    update."""
    config = WriteGates(sequences=20, lr=0.1, weight_decay=0.01)
    tx, p, gradients = config.optimizer(), jnp.float32(2), [0.5, -0.25, 1.0]
    state, m, v, expected, change_of = tx.init(p), 0.0, 0.0, 2.0, jax.jit(tx.update)
    for i, gradient in enumerate(gradients):
        change, state = change_of(jnp.float32(gradient), state, p)
        p = p + change
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        step = m / (1 - 0.9 ** (i + 1)) / (math.sqrt(v / (1 - 0.999 ** (i + 1))) + 1e-8)
        lr = 0.1 * i / 2
        expected = expected * (1 - lr * 0.01) - lr * step
        assert float(p) == pytest.approx(expected, rel=1e-5)
    assert float(p) != 2


def test_the_optimiser_counts_sequences_and_its_batch_is_rounded_up():
    """Gradients are constant, so every step of Adam is −lr."""
    config = WriteGates(mesh=MeshShape(fsdp=8), batch=3, sequences=160, lr=1.0, weight_decay=0.0)
    tx, rate, p = config.optimizer(), warmup_cosine(160, 8, 1.0), jnp.float32(0)
    state, change_of = tx.init(p), jax.jit(tx.update)
    for update in range(6):
        change, state = change_of(jnp.float32(1), state, p)
        assert float(change) == pytest.approx(-float(rate(update)), abs=1e-5), update


def student_on(mesh):
    with jax.set_mesh(mesh):
        model = tiny_model()
        return mesh, model, jax.jit(CONFIG.init)(model)


@pytest.fixture(scope="module")
def student():
    return student_on(make_mesh())


WEIGHT = 0.25
"""Weight of the sparsity in the loss."""


@functools.cache
def loss_of(window, sparsity):
    return jax.jit(WriteGates(window=window, sparsity=sparsity, lambda_=WEIGHT).loss)


def evaluate(student, *, window, gates=None, sparsity="lifetime"):
    mesh, model, initial_gates = student
    with jax.set_mesh(mesh):
        arguments = (
            initial_gates if gates is None else gates,
            model,
            batch(mesh),
            jax.random.key(0),
            np.int32(0),
        )
        return jax.device_get(loss_of(window, sparsity)(*arguments))


def gates_with_logits(student, bias):
    """Return gates with logits that are all `bias`."""
    mesh, _, gates = student
    with jax.set_mesh(mesh):
        flat = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), gates)
        flat.b2[...] = jax.device_put(np.full_like(gates.b2[...], bias), gates.b2[...].sharding)
        return flat


def test_a_window_over_everything_leaves_nothing_to_learn(student):
    """This is WG-KV's §12.1: W ≥ N equals full attention, and R = 1."""
    loss, numbers = evaluate(student, window=24)
    assert numbers["distillation"] < 1e-9
    assert numbers["sparsity"] == 1
    assert loss == pytest.approx(WEIGHT)
    assert numbers["kv_size"] == 1


def test_open_gates_equal_full_attention_and_closed_ones_do_not(student):
    opened, shut = gates_with_logits(student, 30.0), gates_with_logits(student, -30.0)
    _, numbers = evaluate(student, window=4, gates=opened)
    assert numbers["distillation"] < 1e-9
    assert numbers["gate"] == pytest.approx(1)
    assert numbers["sparsity"] == pytest.approx(1)
    _, numbers = evaluate(student, window=4, gates=shut)
    assert numbers["distillation"] > 1e-3
    # o_s = min(1, W/(N − s)): the gate's share is the time spent in the window, and beyond it the gate's floor
    lifetime = np.minimum(1, 4 / np.arange(24, 0, -1)).mean()
    floor = 1 - (1 - GATE_FLOOR) ** 2
    assert numbers["sparsity"] == pytest.approx(lifetime + (1 - lifetime) * floor, rel=1e-5)
    assert numbers["kv_size"] == pytest.approx(4 / 24)
    _, numbers = evaluate(student, window=4, gates=shut, sparsity="paper")
    assert numbers["sparsity"] == pytest.approx(floor, rel=1e-4)


def test_closed_soft_gates_see_only_the_window_like_hard_ones(student):
    mesh, model, _ = student
    flat = gates_with_logits(student, -30.0)
    with jax.set_mesh(mesh):
        tokens = batch(mesh)

        @functools.partial(jax.jit, static_argnums=2)
        def error(gates, model, hard):
            masks, teacher = CONFIG.masks(gates, hard=hard), model.hidden(tokens)
            return jnp.mean(student_errors(masks, model, tokens, teacher, window=4)[0])

        soft, hard = (float(error(flat, model, hard)) for hard in (False, True))
    assert soft == pytest.approx(hard, rel=0.02)


def test_the_loss_is_its_two_terms_and_only_gates_learn(student):
    mesh, model, gates = student
    loss, numbers = evaluate(student, window=4)
    assert loss == pytest.approx(numbers["distillation"] + WEIGHT * numbers["sparsity"], rel=1e-6)
    state = initial_state_on(mesh, model)
    moments = {leaf.shape for leaf in jax.tree.leaves(state.opt) if leaf.ndim}
    assert moments == {leaf.shape for leaf in jax.tree.leaves(gates)}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"float32"}


def initial_state_on(mesh, model, config=CONFIG):
    with jax.set_mesh(mesh):
        return jax.jit(lambda model: initial_state(config, model))(model)


def test_initial_gates_depend_on_the_seed_and_not_on_the_mesh():
    mesh, model, gates = student_on(make_mesh(fsdp=4, tensor=2))
    on_one_device = initial_state_on(make_mesh(), tiny_model())
    for actual, expected in zip(jax.tree.leaves(gates), jax.tree.leaves(on_one_device.params), strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert gates.w1[...].sharding.spec == P(None, HEADS, None, "fsdp")
    changed = initial_state_on(mesh, model, WriteGates(window=4, seed=1, expand=4.0)).params
    assert not np.array_equal(changed.w1[...], gates.w1[...])


@pytest.mark.parametrize(("kind", "width"), [("qwen3", 12), ("llama", 32)])
def test_the_gates_width_is_the_papers_for_each_model(kind, width):
    with jax.set_mesh(make_mesh()):
        gates = jax.eval_shape(WriteGates().init, tiny_model(model_type=kind))
    assert gates.w1.shape == (3, 4, 16, width)


@pytest.fixture(scope="module")
def validated_run():
    return validated(MeshShape())


@pytest.mark.slow
def test_the_hard_distillation_loss_matches_the_paged_cache(validated_run):
    """Each sequence is prefilled into the paged cache, and its final hidden states are compared with full
    attention's."""
    _, mesh, model, gates, validation = validated_run
    errors, rates = [], []
    with jax.set_mesh(mesh):
        policy = make_policy({"wgkv": {"tau": TAU, "window": WINDOW}}, gates=gates).compile(model)
        run, dense = jax.jit(forward), jax.jit(lambda model, rows: model.hidden(rows))
        for tokens in held_out():
            cache = empty_cache(
                policy, batch=1, layers=3, kv_heads=4, head_dim=8, tokens=tokens.size, dtype=jnp.float32
            )
            rows = jnp.asarray(tokens)[None]
            cache, hidden, _ = run(model, policy.read, cache, rows, jnp.array([tokens.size]))
            difference = np.asarray(hidden) - np.asarray(dense(model, rows))
            errors.append(np.square(difference).mean())
            outside_window = tokens.size - (WINDOW - 1)
            rates.append(np.asarray(cache.layers.length)[:, 0] / outside_window)
    assert validation.numbers["hard_distillation"] == pytest.approx(np.mean(errors), rel=1e-4)
    assert validation.numbers["hard_distillation"] > 1e-4
    # the rates count all tokens, also those that are still in the local window
    np.testing.assert_allclose(validation.by_sequence["rates"], np.stack(rates), atol=4 / 24)
    assert 0.2 < validation.by_sequence["rates"].mean() < 0.8


def test_the_soft_distillation_loss_matches_training(validated_run):
    config, mesh, model, gates, validation = validated_run
    errors, means = [], []
    with jax.set_mesh(mesh):
        loss = jax.jit(config.loss)
        for tokens in held_out():
            rows = jnp.asarray(tokens)[None]
            _, numbers = loss(gates, model, rows, jax.random.key(0), np.int32(0))
            errors.append(float(numbers["distillation"]))
            means.append(float(numbers["gate"]))
    numbers = validation.numbers
    assert numbers["distillation"] == pytest.approx(np.mean(errors), rel=1e-5)
    assert numbers["gate"] == pytest.approx(np.mean(means), rel=1e-5)
    assert validation.sequences == 5
    assert numbers["admitted"] == pytest.approx(validation.by_sequence["rates"].mean())
    assert numbers["admitted"] < numbers["kv_size"] < 1


@pytest.mark.thorough
def test_validated_sizes_are_those_of_hard_gates(validated_run):
    config, mesh, model, gates, validation = validated_run
    hard_sizes, soft_sizes = [], []
    with jax.set_mesh(mesh):
        for tokens in held_out():
            rows = jnp.asarray(tokens)[None]
            for hard, sizes in ((True, hard_sizes), (False, soft_sizes)):
                masks = config.masks(gates, hard=hard)
                _, figures = student_errors(masks, model, rows, model.hidden(rows), window=WINDOW)
                sizes.append([float(figures[name].mean()) for name in ("admitted", "kv_size")])
    measured = [validation.numbers[name] for name in ("admitted", "kv_size")]
    assert measured == pytest.approx(np.mean(hard_sizes, 0).tolist(), rel=1e-5)
    assert np.abs(np.mean(hard_sizes, 0) - np.mean(soft_sizes, 0)).min() > 1e-3, (
        np.mean(hard_sizes, 0),
        np.mean(soft_sizes, 0),
    )


def test_exported_rates_are_the_mean_and_the_maximum(tmp_path):
    rates = np.linspace(0, 1, 24).reshape(2, 3, 4)
    with jax.set_mesh(make_mesh()):
        model = tiny_model()
        validation = Validation({"distillation": 1.0}, {"rates": rates}, 2)
        WriteGates(window=6).export(tmp_path / "gates", tiny_gates(model), model, validation)
        policy = make_policy("wgkv", model=model, gates=tmp_path / "gates")
    np.testing.assert_allclose(policy.admission.rate, rates.max(0), atol=1e-4)
    np.testing.assert_allclose(describe(tmp_path / "gates")["rate"], rates.mean(0), atol=1e-4)
