"""Test PruLong's runs: the constraint on how many heads stream, each group's updates, the sampled masks, and the
export."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.builtin import builtin_model
from kvjax.errors import UserError
from kvjax.mesh import make_mesh
from kvjax.models import load_model
from kvjax.models.loading import model_shapes
from kvjax.models.names import by_path
from kvjax.policies import make_policy
from kvjax.policies.admission.head_pattern import choose_heads, whole_count
from kvjax.policies.admission.pattern_folder import read_pattern
from kvjax.tasks import Recall
from kvjax.train import __main__ as command
from kvjax.train import hard_concrete, held_out_report, mask_pictures, report
from kvjax.train.config import parse
from kvjax.train.recipes import prulong
from kvjax.train.recipes.prulong import PruLong, decays
from kvjax.train.run import train
from tests.tiny_models import tiny_config, tiny_model
from tests.train.killed import go_on, run_until_killed
from tests.train.recipes.packed import rows, weighted

SIZES = dict(lengths=(32,), shares=(1.0,), sink=2, window=6, block=1)
MODEL = str(builtin_model("test_model"))


def test_the_target_sparsity_rises_over_four_fifths_of_the_updates():
    recipe = PruLong(sparsity=0.7)
    assert recipe.steps == 1000
    for step, expected in ((0, 0), (400, 0.35), (800, 0.7), (999, 0.7)):
        assert float(recipe.target_sparsity(jnp.int32(step))) == pytest.approx(expected)


@pytest.mark.parametrize("sparsity", [0.3, 0.7])
@pytest.mark.parametrize("l0", ["sampled", "expected"])
def test_the_share_of_streaming_heads_reaches_its_target(monkeypatch, sparsity, l0):
    """The run has the paper's rates and 256 heads, and the model's loss is 0. The share is an average over the last 50
    of 1,000 updates."""
    monkeypatch.setattr(prulong, "next_token_losses", lambda *_: jnp.zeros(1))
    monkeypatch.setattr(PruLong, "blended", lambda *_: None)
    recipe = PruLong(sparsity=sparsity, l0=l0, **SIZES)
    batch = dict.fromkeys(("tokens", "document", "labelled"))
    with jax.set_mesh(make_mesh()):
        model = tiny_model(num_layers=32, num_heads=8, num_kv_heads=8)
        params, tx = jax.jit(recipe.init)(model), recipe.optimizer()

        @jax.jit
        def run(params):
            def update(state, step):
                params, opt = state
                key = jax.random.fold_in(jax.random.key(1), step)
                loss = lambda p: recipe.loss(p, model, batch, key, step)  # noqa: E731
                (_, numbers), gradients = jax.value_and_grad(loss, has_aux=True)(params)
                change, opt = tx.update(gradients, opt, params)
                params = jax.tree.map(lambda x, y: x + y, params, change)
                return (params, opt), numbers["streaming"]

            return jax.lax.scan(update, (params, tx.init(params)), jnp.arange(recipe.steps))

        _, streaming = run(params)
    assert float(streaming[0]) < 0.1, "at first hardly any does"
    assert float(streaming[-50:].mean()) == pytest.approx(sparsity, abs=0.03)


def first_change(**gradients):
    """Return the changes of the second update, whose rate is the first above 0, to parameters of 1 with these
    gradients."""
    recipe = PruLong(sequences=80, weight_decay=0.1, **SIZES)
    params = {"log_alpha": jnp.ones((2, 3)), "multipliers": jnp.ones(2)}
    tx = recipe.optimizer()
    opt, update = tx.init(params), jax.jit(tx.update)
    for _ in range(2):
        change, opt = update(gradients, opt, params)
    return change


def test_multipliers_ascend_masks_descend_and_both_decay():
    """The first multiplier's gradient is the gap: if that is below 0, the multiplier falls. Adam's first steps are as
    long as the rate."""
    change = first_change(log_alpha=jnp.full((2, 3), 0.1), multipliers=jnp.asarray([-0.1, 0.1]))
    np.testing.assert_allclose(change["log_alpha"], -1 - 0.1, rtol=1e-3)
    np.testing.assert_allclose(change["multipliers"], [-1 - 0.1, 1 - 0.1], rtol=1e-3)


def test_gradients_of_multipliers_are_the_gap_and_its_square(monkeypatch):
    """Therefore too few streaming heads lower the first multiplier."""
    monkeypatch.setattr(prulong, "next_token_losses", lambda *_: jnp.zeros(1))
    monkeypatch.setattr(PruLong, "blended", lambda *_: None)
    recipe, batch = PruLong(sparsity=0.7, **SIZES), dict.fromkeys(("tokens", "document", "labelled"))
    with jax.set_mesh(make_mesh()):
        model = tiny_model()
        params, key = jax.jit(recipe.init)(model), jax.random.key(0)
        loss = lambda p: recipe.loss(p, model, batch, key, jnp.int32(900))  # noqa: E731
        gradients, numbers = jax.jit(jax.grad(loss, has_aux=True))(params)
    gap = float(numbers["streaming"]) - 0.7
    assert gap < -0.5
    np.testing.assert_allclose(gradients["multipliers"], [gap, gap**2], rtol=1e-5)


def test_gradients_are_clipped_together():
    """Adam is independent of a gradient's length except for its eps: if the multipliers make the norm huge, masks
    hardly move."""
    change = first_change(log_alpha=jnp.full((2, 3), 1.0), multipliers=jnp.asarray([1e8, 0.0]))
    assert np.abs(np.asarray(change["log_alpha"]) + 0.1).max() < 0.6


def rates_of(peak, updates=100):
    """Return rates that rise from 0 over a tenth of the updates, then fall by a cosine to a hundredth of the peak."""
    up = np.arange(10) / 10
    down = 0.01 + 0.99 * (1 + np.cos(np.pi * np.arange(updates - 10) / (updates - 10))) / 2
    return peak * np.concatenate([up, down])


PEAKS = {"log_alpha": 1.0, "multipliers": 0.5, "model": 1e-3}


def changes(gradients, **options):
    """Return the changes of each group in every update, for parameters of 1 with the same given gradients."""
    sizes = {"sequences": 800, "lr": 1.0, "multiplier_lr": 0.5, "model_lr": 1e-3}
    tx = PruLong(frozen_model=False, **sizes, **SIZES, **options).optimizer()
    params = {name: jnp.ones(2) for name in PEAKS}
    opt, changes_by_group, update = tx.init(params), {name: [] for name in PEAKS}, jax.jit(tx.update)
    for gradient in gradients:
        change, opt = update(jax.tree.map(lambda x, g=gradient: np.full_like(x, g), params), opt, params)
        for name, x in change.items():
            changes_by_group[name].append(float(np.asarray(x)[0]))
    return changes_by_group


def test_rates_warm_up_for_a_tenth_of_the_updates_and_fall_by_a_cosine():
    """Masks, multipliers and model each have their own peak. Adam's step is the rate, and multipliers ascend."""
    for name, steps in changes(np.ones(100), weight_decay=0.0).items():
        sign = 1 if name == "multipliers" else -1
        np.testing.assert_allclose(sign * np.asarray(steps), rates_of(PEAKS[name]), rtol=1e-3, atol=1e-8)


def test_every_group_uses_adamw_with_the_papers_betas():
    """The betas are 0.9 and 0.95, and decay is multiplied by the rate. The expected values are computed by hand."""
    gradients = np.random.default_rng(0).standard_normal(30)
    steps = np.arange(1, 31)
    first, second = np.zeros(31), np.zeros(31)
    for i, g in enumerate(gradients):
        first[i + 1], second[i + 1] = 0.9 * first[i] + 0.1 * g, 0.95 * second[i] + 0.05 * g * g
    adam = first[1:] / (1 - 0.9**steps) / np.sqrt(second[1:] / (1 - 0.95**steps))
    for name, actual in changes(gradients, weight_decay=0.1, clip=1e6).items():
        direction = -adam if name == "multipliers" else adam
        np.testing.assert_allclose(
            actual, -rates_of(PEAKS[name])[:30] * (direction + 0.1), rtol=1e-3, atol=1e-8
        )


def test_the_model_s_matrices_decay_and_its_norms_and_biases_do_not():
    with jax.set_mesh(make_mesh()):
        model = model_shapes(tiny_config(attention_bias=True, mlp_bias=True, qk_norm=True))
    decaying, _ = by_path(decays(model))
    matrices = {name for name, leaf in decaying.items() if leaf}
    assert matrices == {"embed", "qkv", "o", "gate_up", "down"}
    assert {
        "attention_norm.scale",
        "norm.scale",
        "q_norm.scale",
        "qkv_bias",
        "down_bias",
    } <= decaying.keys() - matrices


def test_the_expected_sparsity_is_the_mean_of_many_samples():
    log_alpha = jnp.asarray([[4.0, 0.5, -2.0]])
    streams = jax.jit(jax.vmap(lambda key: 1 - (hard_concrete.sample(key, log_alpha) > 0)))
    draws = np.asarray(streams(jax.random.split(jax.random.key(0), 20000)))
    expected = hard_concrete.probability_of_zero(log_alpha)
    np.testing.assert_allclose(draws.mean(0), expected, atol=0.01)


@pytest.mark.slow
def test_gradients_of_log_alphas_match_finite_differences():
    """The whole loss, the model's part and the constraint's, is compared for one sample in which no head's mask is
    clipped."""
    recipe = PruLong(sequences=80, **SIZES)
    random = np.random.default_rng(0)
    tokens = random.integers(0, 61, (2, 32)).astype(np.int32)
    batch = {"tokens": tokens, "document": np.zeros_like(tokens), "labelled": tokens >= 0}
    with jax.set_mesh(make_mesh()):
        model, batch = tiny_model(), jax.tree.map(jnp.asarray, batch)
        keys = jax.random.split(jax.random.key(0), 20000)
        samples = jax.jit(jax.vmap(lambda key: hard_concrete.sample(key, jnp.zeros((3, 4)))))(keys)
        inside = np.abs(np.asarray(samples) - 0.5).max((1, 2))
        assert inside.min() < 0.46
        key = keys[inside.argmin()]

        @jax.jit
        def loss(log_alpha):
            params = {"log_alpha": log_alpha, "multipliers": jnp.asarray([0.7, 0.4])}
            return recipe.loss(params, model, batch, key, jnp.int32(5))[0]

        actual, step = np.asarray(jax.jit(jax.grad(loss))(jnp.zeros((3, 4)))), 0.02
        for index in np.ndindex(3, 4):
            moved = np.zeros((3, 4), np.float32)
            moved[index] = step
            expected = (float(loss(jnp.asarray(moved))) - float(loss(jnp.asarray(-moved)))) / (2 * step)
            assert actual[index] == pytest.approx(expected, rel=0.005, abs=3e-4)
    assert np.abs(actual).min() > 3e-3


def test_a_packed_row_has_the_loss_of_its_separate_documents():
    """The losses are weighted by their labelled tokens, and all rows have the same sampled masks."""
    recipe, (together, separate) = PruLong(start=0.0, **SIZES), rows()
    with jax.set_mesh(make_mesh()):
        model = tiny_model()
        params = jax.jit(recipe.init)(model)

        @jax.jit
        def loss(batch):
            value, numbers = recipe.loss(params, model, batch, jax.random.key(3), jnp.int32(0))
            return value, numbers["streaming"]

        value, streaming = loss(together)
        losses = [float(loss(row)[0]) for row in separate]
    assert 0.2 < float(streaming) < 0.8
    assert abs(losses[0] - losses[1]) > 0.01
    assert float(value) == pytest.approx(weighted(losses, separate), rel=1e-5)


def test_masks_are_rounded_as_in_the_deployed_pattern():
    """Equal weights are rounded alike at every share: the earlier head is whole."""
    weights = np.asarray([[0.5, -3.0, 0.5, 9.0], [0.5, 2.0, -3.0, 0.5]], np.float32)
    for share in np.linspace(0, 1, 41):
        recipe = PruLong(sparsity=float(share), **SIZES)
        actual = recipe.rounded({"log_alpha": jnp.asarray(weights)})
        expected = choose_heads(weights, whole_count(weights.size, float(share)))
        np.testing.assert_array_equal(actual, expected)


def test_weights_of_0_and_1_are_used_as_they_are():
    """They cannot be ranked for another sparsity, so held-out figures, policies and a report's rows use them
    unchanged."""
    recipe = PruLong(sparsity=0.5, **SIZES)
    with jax.set_mesh(make_mesh()):
        model = tiny_model()
        weights = jnp.asarray(np.arange(12).reshape(3, 4) % 4 == 0, jnp.float32)
        params = {"log_alpha": weights, "multipliers": jnp.zeros(2)}
        np.testing.assert_array_equal(recipe.rounded(params), weights)
        np.testing.assert_array_equal(recipe.deploy(params, model).admission.pattern, weights == 1)
        assert list(recipe.sweep(params, model, ())) == [""]
        params["log_alpha"] = weights.at[0, 0].set(0.9)
        assert list(recipe.sweep(params, model, ())) == [f"sparsity={x}" for x in (0.5, 0.3, 0.7, 0.9)]


COMMON = [
    *("--method", "prulong", "--model", MODEL, "--dtype", "float32", "--mesh", "1", "--lengths", "64"),
    *("--batch", "4", "--sequences", "24", "--sink", "2", "--window", "8", "--validation", "2"),
    *("--block", "1", "--report", "none"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prulong") / "run"
    return train(parse([*COMMON, "--sparsity", "0.5", "--out", str(folder)]))


@pytest.mark.slow
def test_a_run_exports_a_pattern_for_any_sparsity(run):
    folder = run.folder / "pattern"
    model = load_model(MODEL)
    weights = np.loadtxt(folder / "full_attention_heads.tsv", delimiter="\t", ndmin=2)
    np.testing.assert_allclose(np.log(weights / (1 - weights)), run.params["log_alpha"], rtol=1e-6)
    assert ((weights > 0) & (weights < 1)).all(), "what clips it to 0 … 1 reads the same order"
    policy = make_policy({"head_pattern": {"pattern": folder}}, model=model)
    assert policy.window == 8
    heads = model.config.num_layers * model.config.num_kv_heads
    for share, sparse_policy in (
        (0.5, policy),
        (0.25, make_policy({"head_pattern": {"pattern": folder, "sparsity": 0.25}}, model=model)),
    ):
        pattern = np.asarray(sparse_policy.admission.pattern)
        assert pattern.sum() == whole_count(heads, share)
    description = json.loads((folder / "config.json").read_text())
    assert {
        "sink_size": 2,
        "recent_size": 8,
        "sparsity": 0.5,
        "method": "prulong",
    }.items() <= description.items()
    assert policy.admission.made_for is not None, "and for which model"
    assert (folder / "orbax").is_dir()
    for picture in ("weights.png", "course.png"):
        assert (run.folder / picture).read_bytes().startswith(b"\x89PNG")
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert {"cross_entropy", "streaming", "wanted", "lambda/1", "lambda/2"} <= lines[0].keys()


@pytest.mark.thorough
def test_a_killed_run_ends_like_an_uninterrupted_one(run, tmp_path):
    """The logged numbers and the results show that sampling of masks, multipliers and moments all continue."""
    args = [*COMMON, "--sparsity", "0.5", "--checkpoint-every", "2"]
    resumed = go_on(run_until_killed(args, tmp_path / "run"), "1")
    actual, expected = (logged(x.folder) for x in (resumed, run))
    assert [line["step"] for line in actual] == list(range(6))
    assert actual == expected
    assert actual[5]["lambda/1"] != actual[2]["lambda/1"]
    jax.tree.map(np.testing.assert_array_equal, resumed.params, run.params)
    assert resumed.validation.numbers == run.validation.numbers


def logged(folder):
    """Return the logged numbers of each update without its times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = "step", "loss", "cross_entropy", "streaming", "wanted", "lambda/1", "lambda/2"
    return [{name: line[name] for name in names} for line in lines if "loss" in line]


@pytest.mark.slow
def test_pictures_show_what_a_run_learned_and_logged(run, monkeypatch):
    """The pictures show its weights next to the whole heads, and every scalar over the updates."""
    sheets, make = [], mask_pictures.figure
    monkeypatch.setattr(mask_pictures, "figure", lambda *size: sheets.append(make(*size)) or sheets[-1])
    parse([*COMMON, "--sparsity", "0.5", "--out", str(run.folder / "x")]).draw(run.folder, run.validation)
    heads, course = sheets
    learned, whole_heads = (axes.images[0].get_array() for axes in heads.axes[:2])
    weights = np.asarray(run.params["log_alpha"])
    np.testing.assert_allclose(np.log(learned / (1 - learned)), weights, rtol=1e-5)
    np.testing.assert_array_equal(whole_heads, choose_heads(weights, whole_count(weights.size, 0.5)))
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if "validation" not in line]
    assert len(updates) == 6 < len(lines)
    labels = [[line.get_label() for line in axes.lines] for axes in course.axes]
    assert labels == [["cross_entropy"], ["streaming", "wanted"], ["lambda/1", "lambda/2"]]
    for line in (line for axes in course.axes for line in axes.lines):
        np.testing.assert_array_equal(line.get_xdata(), range(6))
        np.testing.assert_array_equal(line.get_ydata(), [update[line.get_label()] for update in updates])
    assert np.ptp(course.axes[2].lines[0].get_ydata()) > 0.1, "multipliers move"


@pytest.mark.slow
def test_held_out_sequences_are_measured_with_the_deployed_masks(run):
    """Without streaming heads the two losses are equal."""
    numbers = run.validation.numbers
    assert numbers["cross_entropy"] != numbers["full_cross_entropy"]
    dense = dataclasses.replace(parse([*COMMON, "--out", str(run.folder / "x")]), sparsity=0.0)
    with jax.set_mesh(run.mesh):
        tokens = jnp.asarray(np.random.default_rng(0).integers(0, 61, (2, 64)))
        batch = {"tokens": tokens, "document": tokens * 0, "labelled": tokens >= 0}
        measured = jax.jit(dense.measure)(run.params, run.model, batch)
    np.testing.assert_allclose(measured["cross_entropy"], measured["full_cross_entropy"], rtol=1e-6)


@pytest.mark.thorough
def test_the_model_can_be_trained_too(tmp_path):
    args = ["--no-frozen-model", "--model-lr", "1e-3", "--out", str(tmp_path / "run")]
    trained = train(parse([*COMMON, *args]))
    before = load_model(MODEL)
    moved = [
        float(jnp.abs(x - y).max())
        for x, y in zip(jax.tree.leaves(trained.model), jax.tree.leaves(before), strict=True)
    ]
    assert 0 < max(moved) < 1e-2
    model = load_model(tmp_path / "run/pattern/model")
    make_policy({"head_pattern": {"pattern": tmp_path / "run/pattern"}}, model=model)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--sparsity", "1.5"], "--sparsity must be from 0 to 1, got 1.5"),
        (["--block", "0"], "--block must be at least 1, got 0"),
        (
            ["--block", "32"],
            "--lengths 64 must be above the 64 tokens of --sink 2 and --window 8 in blocks of 32",
        ),
        (
            ["--window", "64"],
            "--lengths 64 must be above the 66 tokens of --sink 2 and --window 64 in blocks of 1",
        ),
    ],
)
def test_wrong_options_are_errors_of_one_line(wrong, message):
    with pytest.raises(UserError, match=message):
        parse([*COMMON, *wrong])


def rows_of(folder):
    """Return a report's rows by name, after checking that its table has them, and each head's share of tokens."""
    report_json, text = json.loads((folder / "report.json").read_text()), (folder / "report.md").read_text()
    rows = {row.get("policy", row.get("method")): row for row in report_json["rows"]}
    for name, row in rows.items():
        assert f"| {name} | {row['kv_ratio']:.3f} | {row['footprint']:.3f} |" in text
    return rows, np.asarray(report_json["rates"])


def kv_ratio_of(context, whole_heads):
    """Return the share of a full cache of `context` tokens if `whole_heads` of the model's 8 heads keep everything. The
    other heads keep 2 sinks and 7 tokens of the window."""
    return (whole_heads * context + (8 - whole_heads) * 9) / (8 * context)


@pytest.mark.thorough
def test_a_text_report_has_a_row_for_each_sparsity(run, tmp_path):
    """The rows begin with the smallest cache. Of 64 tokens 8 are predicted, each from those before it."""
    recipe = parse([*COMMON, "--sparsity", "0.5", "--out", str(tmp_path / "run")])
    recipe = dataclasses.replace(recipe, report="default")
    with jax.set_mesh(run.mesh):
        trained = run.held_out, run.validation, "summary", print
        held_out_report.report(run.model, run.params, recipe, tmp_path, *trained)
    rows, rates = rows_of(tmp_path)
    head_counts = {f"prulong sparsity={share}": int(8 * (1 - share) + 0.01) for share in (0.9, 0.7, 0.5, 0.3)}
    assert list(rows) == [*head_counts, "full"]
    for name, count in head_counts.items():
        assert rows[name]["kv_ratio"] == pytest.approx(kv_ratio_of(55, count))
        assert rows[name]["distillation"] > 0
    assert (rows["full"]["kv_ratio"], rows["full"]["distillation"]) == (1, 0)
    used = choose_heads(np.asarray(run.params["log_alpha"]), 4)
    np.testing.assert_array_equal(rates == 1, used, "those of the run's own sparsity")


@pytest.mark.thorough
def test_the_report_has_a_row_for_the_trained_policy(monkeypatch, tmp_path):
    """The report also has the full cache and methods of the same size. Of 128 tokens 124 are read before the
    question."""
    monkeypatch.setitem(report.SAMPLES, "default", {Recall: 2})
    monkeypatch.setitem(report.RIVAL_SAMPLES, Recall, 1)
    monkeypatch.setattr(report, "CONTEXT", 128)
    monkeypatch.setattr(PruLong, "rivals", {})
    args = [*COMMON, "--sparsity", "0.5", "--sequences", "8", "--out", str(tmp_path / "run")]
    command.main([*args, "--report", "default"])
    rows, rates = rows_of(tmp_path / "run")
    assert list(rows) == [
        *("full", "prulong", "sink + window", "head pattern", "random", "random, the trained rates")
    ]
    assert rows["prulong"]["kv_ratio"] == pytest.approx(kv_ratio_of(124, 4))
    weights = read_pattern(tmp_path / "run/pattern").weights
    np.testing.assert_array_equal(rates == 1, choose_heads(weights, 4))
