"""Test DuoAttention's runs: the loss at labelled tokens, the schedule, α in [0, 1], and the export."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.builtin import builtin_model
from kvjax.mesh import make_mesh, use_mesh
from kvjax.models import load_model
from kvjax.policies import make_policy
from kvjax.train.config import parse
from kvjax.train.recipes.duo_attention import DuoAttention
from kvjax.train.run import train
from tests.tiny_models import tiny_model
from tests.train.recipes.packed import rows, weighted

SIZES = dict(lengths=(32,), shares=(1.0,), sink=2, window=6, block=1)
MODEL = str(builtin_model("test_model"))


@pytest.fixture(scope="module")
def batch():
    random = np.random.default_rng(0)
    tokens = jnp.asarray(random.integers(0, 61, (2, 32)), jnp.int32)
    return {
        "tokens": tokens,
        "document": jnp.zeros_like(tokens),
        "labelled": jnp.asarray(random.random((2, 32)) < 0.2),
    }


def test_the_loss_is_the_error_before_labelled_tokens_plus_the_mean_alpha(batch):
    model, recipe = tiny_model(), DuoAttention(**SIZES)
    call = jax.jit(lambda p, m, b: recipe.loss(p, m, b, jax.random.key(0), jnp.int32(0)))

    def loss_of(alpha):
        with use_mesh(model):
            return call({"alpha": np.full((3, 4), alpha, np.float32)}, model, batch)

    loss, numbers = loss_of(1.0)
    assert float(numbers["distillation"]) < 1e-11, "full heads are the teacher's"
    assert float(loss) == pytest.approx(0.05)
    loss, numbers = loss_of(0.0)

    @jax.jit
    def difference(model, batch):
        return recipe.blended(jnp.zeros((3, 4)), model, batch) - model.hidden(batch["tokens"])

    with use_mesh(model):
        squares = np.square(difference(model, batch)).mean(-1)
    answers = np.asarray(batch["labelled"])[:, 1:]
    expected = np.mean([row[:-1][predicts].mean() for row, predicts in zip(squares, answers, strict=True)])
    assert expected > 1e-4
    assert float(numbers["distillation"]) == pytest.approx(expected, rel=1e-5)
    assert float(loss) == pytest.approx(expected, rel=1e-5)


def test_a_packed_row_has_the_loss_of_its_separate_documents():
    """The losses are weighted by their labelled tokens."""
    recipe, (together, separate) = DuoAttention(regularized=0.0, **SIZES), rows()
    alpha = jnp.asarray(np.random.default_rng(2).uniform(size=(3, 4)), jnp.float32)
    model = tiny_model()
    with use_mesh(model):
        call = jax.jit(lambda b: recipe.loss({"alpha": alpha}, model, b, jax.random.key(0), jnp.int32(0))[0])
        packed_loss, *losses = (float(call(batch)) for batch in (together, *separate))
    assert min(losses) > 1e-4
    assert abs(losses[0] / losses[1] - 1) > 0.01
    assert packed_loss == pytest.approx(weighted(losses, separate), rel=1e-4)


def test_alpha_stays_between_0_and_1():
    recipe = DuoAttention(sequences=10, lr=0.5, **SIZES)
    params = {"alpha": jnp.asarray([[1.0, 0.5, 0.0]])}
    tx = recipe.optimizer()
    opt, alphas, update = tx.init(params), [], jax.jit(tx.update)
    for _ in range(10):
        change, opt = update({"alpha": jnp.asarray([[-1.0, 1.0, 1.0]])}, opt, params)
        params = {"alpha": params["alpha"] + change["alpha"]}
        alphas.append(np.asarray(params["alpha"]))
    np.testing.assert_array_equal(alphas[-1], [[1, 0, 0]])
    assert all(0 <= x.min() <= x.max() <= 1 for x in alphas)


def test_the_rate_is_a_trapezoid():
    """The rate rises over a fifth of the updates, falls over the last fifth, and is never below a tenth. Adam's step is
    the rate."""
    recipe = DuoAttention(sequences=100, lr=1e-3, **SIZES)
    params, tx = {"alpha": jnp.asarray([[0.5]])}, recipe.optimizer()
    opt, steps, update = tx.init(params), [], jax.jit(tx.update)
    for _ in range(100):
        change, opt = update({"alpha": np.ones((1, 1), np.float32)}, opt, params)
        steps.append(-float(np.asarray(change["alpha"])[0, 0]) * 1e3)
    expected = [min(1, max(min((i + 1) / 20, (100 - i) / 20), 0.1)) for i in range(100)]
    np.testing.assert_allclose(steps, expected, rtol=1e-3)


@pytest.mark.slow
def test_a_run_exports_a_pattern(tmp_path):
    args = [
        *("--method", "duo_attention", "--model", MODEL, "--dtype", "float32", "--mesh", "1"),
        *("--lengths", "128", "--batch", "4", "--sequences", "16", "--sink", "2", "--window", "8"),
        *("--block", "1", "--lr", "0.2"),
        *("--validation", "2", "--report", "none", "--out", str(tmp_path / "run")),
    ]
    run = train(parse(args))
    model = load_model(MODEL)
    policy = make_policy({"head_pattern": {"pattern": tmp_path / "run/pattern"}}, model=model)
    assert policy.window == 8
    alpha = np.asarray(run.params["alpha"])
    assert 0 <= alpha.min() < alpha.max() <= 1
    with jax.set_mesh(make_mesh()):
        assert run.validation.numbers["used_distillation"] > 0
