"""Test Fast KVzip's recipe: its loss and schedule, and whole runs on the test-size model, killed in both phases."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from flax import nnx

from kvjax.builtin import builtin_model
from kvjax.errors import UserError
from kvjax.mesh import make_mesh
from kvjax.models import load_tokenizer
from kvjax.models.chat import encode
from kvjax.policies.eviction.fast_kvzip import SinkGate, load_gates, save_gates
from kvjax.struct import leaves_by_path
from kvjax.train import targets
from kvjax.train.__main__ import main
from kvjax.train.batches import Rows, to_mesh
from kvjax.train.config import SAVED, parse
from kvjax.train.recipes.fast_kvzip import KVzipGates
from kvjax.train.run import check, export_checkpoint, train
from kvjax.train.score_loss import cross_entropy, entropy, rate, scores
from kvjax.train.update import initial_state, make_update
from tests.processes import TRAIN, run_processes
from tests.tasks.model_tokenizers import smol_tokenizer
from tests.tiny_models import tiny_model, tiny_sink_gates
from tests.train.killed import SECOND_SAVE, go_on, run_until_killed

MODEL = str(builtin_model("test_model"))
ARGS = [
    *("--method", "fast_kvzip", "--model", MODEL, "--dtype", "float32", "--lengths", "64", "--shares", "1"),
    *(
        "--contexts",
        "4",
        "--batch",
        "32",
        "--sequences",
        "192",
        "--checkpoint-every",
        "2",
        "--validation",
        "1",
    ),
    *("--report", "none", "--targets", "disk"),
]

THIRD_SHARD = """
from kvjax.train import targets
from kvjax.train.features import FolderStore

targets.TOKENS_TOGETHER = 1  # a context after another
writing, written = FolderStore.writing, []

def killed_in_the_third(self, index):
    if len(written) == 2:
        with writing(self, index):
            kill()
    written.append(index)
    return writing(self, index)

FolderStore.writing = killed_in_the_third
"""


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(6))
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def full_run(tmp_path_factory):
    return train(parse([*ARGS, "--mesh", "1", "--out", str(tmp_path_factory.mktemp("whole") / "run")]))


@pytest.mark.parametrize(("updates", "warm_up"), [(5000, 50), (2000, 20), (800, 8)])
def test_the_rate_warms_up_for_a_hundredth_of_the_updates(updates, warm_up):
    rates = [float(rate(update, 0.2, updates)) for update in (0, 1, warm_up - 1, warm_up)]
    assert rates == pytest.approx([0, 0.002, 0.002 * (warm_up - 1), 0.2])
    assert float(rate(0, 0.2, 1)) == pytest.approx(0.2), "a single update has the peak"


def test_the_rate_matches_the_authors_code():
    rates = [float(rate(update, 0.2, 5000)) for update in (0, 1, 49, 50, 2499, 2500, 3749, 3750, 4999)]
    assert rates == pytest.approx([0, 0.002, 0.098, 0.2, 0.2, 0.1, 0.1, 0.05, 0.05])


def test_no_prediction_is_better_than_the_target():
    target = np.random.default_rng(0).uniform(size=(50, 2, 3)).astype(np.float32)
    assert summed_loss(target, target) == pytest.approx(entropy(target), rel=1e-5)
    for prediction in (target * 0.99, target + 0.01 * (1 - target)):
        assert summed_loss(prediction, target) > entropy(target)
    exact = np.array([[[0.0, 1.0]]], np.float32)
    assert entropy(exact) == pytest.approx(0, abs=1e-9)
    assert summed_loss(1 - exact, exact) == pytest.approx(-2 * np.log(1e-6), rel=1e-2), (
        "clipped, and not infinite"
    )


def summed_loss(predicted, target):
    """Return the summed loss."""
    return float(np.asarray(jax.jit(cross_entropy)(predicted, target)).mean(0).sum())


def learnable(random, count, model):
    """Return positions whose scores are a function of their hidden states."""
    l, k, d = model.config.num_layers, model.config.num_kv_heads, model.config.width
    x = random.standard_normal((count, l, d)).astype(np.float32)
    w = np.random.default_rng(99).standard_normal((l, k, d)) / np.sqrt(d)
    score = 1 / (1 + np.exp(2 - 2 * np.einsum("nld,lkd->nlk", x, w)))
    return {"input": x, "score": score.astype(np.float32)}


@functools.cache
def trained(data, fsdp, tensor, updates=120):
    """Return the losses of updates on this mesh, and the measurements of an unseen batch."""
    recipe = KVzipGates(sequences=500 * 64, batch=64, dim=8, lr=0.2)
    mesh, random, losses = make_mesh(data, fsdp, tensor), np.random.default_rng(0), []
    with jax.set_mesh(mesh):
        model = tiny_model()
        state, update = jax.jit(lambda model: initial_state(recipe, model))(model), make_update(recipe)
        for step in range(updates):
            batch = to_mesh(mesh, Rows(np.arange(64), 64, 0), learnable(random, 64, model))
            state, numbers = update(state, model, batch, np.int32(step))
            losses.append(float(numbers["loss"]))
        unseen = to_mesh(mesh, Rows(np.arange(64), 64, 0), learnable(random, 64, model))
        measured = jax.device_get(jax.jit(recipe.measure)(state.params, model, unseen))
    return losses, measured


def test_gates_learn_more_than_each_heads_mean():
    training_losses, measured = trained(1, 1, 1)
    target = measured["target"]
    mean = np.broadcast_to(target.mean(0), target.shape)
    loss_of_mean = summed_loss(mean, target)
    assert (
        entropy(target)
        < measured["loss"].mean()
        < loss_of_mean - 0.5 * (loss_of_mean - entropy(target))
        < training_losses[0]
    )
    assert measured["agreement"].shape == (64,)
    layers = sum(x for name, x in measured.items() if name.startswith("loss/"))
    np.testing.assert_allclose(layers, measured["loss"], rtol=1e-5)


@pytest.mark.parametrize("shape", [(2, 2, 2), pytest.param((1, 4, 2), marks=pytest.mark.thorough)])
def test_losses_on_a_mesh_match_one_device(shape):
    mesh_losses, measured = trained(*shape, updates=4)
    assert mesh_losses == pytest.approx(trained(1, 1, 1)[0][:4], rel=1e-5)
    assert measured["loss"].shape == (64,)


def test_the_first_loss_matches_predictions_by_hand():
    recipe = KVzipGates(batch=8, sequences=8, dim=4)
    with jax.set_mesh(make_mesh()):
        model = tiny_model()
        gates = jax.jit(recipe.init)(model)
        batch = learnable(np.random.default_rng(0), 8, model)
        loss, numbers = jax.jit(recipe.loss)(
            gates, None, to_mesh(make_mesh(), Rows(np.arange(8), 8, 0), batch), jax.random.key(0), 0
        )
        apply_gate, host_gates = jax.jit(lambda gate, x: gate(x)), jax.device_get(gates)
        p = []
        for layer in range(model.config.num_layers):
            gate = jax.tree.map(lambda x, layer=layer: x[layer], host_gates)
            p.append(np.float64(apply_gate(gate, batch["input"][None, :, layer])[0]))
        p = np.stack(p)
    t = np.float64(batch["score"]).transpose(1, 2, 0)
    by_hand = -(t * np.log(p) + (1 - t) * np.log(1 - p)).mean(-1).sum(-1)
    assert float(loss) == pytest.approx(by_hand.sum(), rel=1e-5)
    for layer, expected in enumerate(by_hand):
        assert float(numbers[f"loss/{layer}"]) == pytest.approx(expected, rel=1e-5)
    assert float(numbers["agreement"]) == pytest.approx(((p >= 0.05) == (t >= 0.05)).mean())


@pytest.mark.parametrize("inputs", ["hidden", pytest.param("k", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "form",
    ["sink", *(pytest.param(x, marks=pytest.mark.thorough) for x in ("paper", "sigmoid", "linear", "mlp"))],
)
def test_every_gate_has_a_gradient(form, inputs):
    recipe = KVzipGates(batch=8, sequences=8, dim=4, form=form, inputs=inputs)
    mesh = make_mesh(fsdp=2, tensor=2)
    with jax.set_mesh(mesh):
        model = tiny_model()
        gates = jax.jit(recipe.init)(model)
        random = np.random.default_rng(0)
        batch = {
            n: random.uniform(size=(8, *x.shape)).astype(x.dtype) for n, x in recipe.row(model, 0).items()
        }
        batch = to_mesh(mesh, Rows(np.arange(8), 8, 0), batch)
        gradients = jax.jit(jax.grad(lambda gates: recipe.loss(gates, None, batch, jax.random.key(0), 0)[0]))(
            gates
        )
        assert jax.eval_shape(scores, gates, batch["input"]).shape == (3, 4, 8)
    assert all(np.isfinite(x).all() and np.any(x) for x in jax.tree.leaves(jax.device_get(gradients)))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("when", "files"),
    [(THIRD_SHARD, 4), (SECOND_SAVE, 8)],
    ids=["targets", "gates"],
)
def test_a_killed_run_ends_like_an_uninterrupted_one(when, files, full_run, tmp_path):
    """The run is killed while targets are computed, after two numbers of each context were written, or later."""
    folder = run_until_killed([*ARGS, "--mesh", "1"], tmp_path / "run", when)
    shards = {file: file.stat() for file in sorted(folder.glob("targets/0*/*.npy"))}
    assert len(shards) == files
    resumed = go_on(folder, "1")
    for file, before in shards.items():
        after = file.stat()
        assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns), file
    assert len(list((folder / "targets").iterdir())) == 5, "four contexts and the manifest"
    assert losses(folder) == pytest.approx(losses(full_run.folder), rel=1e-5)
    assert resumed.validation.numbers == pytest.approx(full_run.validation.numbers, rel=1e-5)


@pytest.mark.thorough
def test_memory_trains_like_the_disk_and_a_mesh_like_one_device(full_run, tmp_path):
    args = [*ARGS[:-2], "--targets", "memory", "--mesh", "4x2", "--out", str(tmp_path / "run")]
    train(parse(args))
    assert losses(tmp_path / "run") == pytest.approx(losses(full_run.folder), rel=1e-5)
    assert not (tmp_path / "run" / "targets").exists()


@pytest.mark.slow
def test_a_run_writes_gates_and_pictures(full_run, capsys):
    folder = full_run.folder
    for name in ("predictions.png", "losses.png"):
        assert (folder / name).stat().st_size > 1000
    gates, described = load_gates(folder / "gates")
    for name, x in leaves_by_path(full_run.params).items():
        np.testing.assert_array_equal(x, leaves_by_path(gates)[name])
    assert described["target"] == "reconstruction"
    assert described["opening"] == [load_tokenizer(MODEL).bos_token_id]
    assert described["validation"] == pytest.approx(full_run.validation.numbers | {"positions": 3})
    text = str(full_run.validation)
    assert text.startswith("held out (3 positions): ")
    assert "loss/" not in text
    exported, step, _ = export_checkpoint(
        parse(["--resume", "--out", str(folder), "--mesh", "1"]), 4, folder / "early"
    )
    assert step == 4
    assert exported.validation.sequences == 3
    assert "targets" in capsys.readouterr().err


def test_prefixes_of_contexts_are_never_evicted(monkeypatch):
    """The prefix includes the chat template's system prompt and the instruction, in the prompts that have them."""
    tokenizer, recipe = smol_tokenizer(), KVzipGates()
    monkeypatch.setattr("kvjax.train.recipes.kvzip_scores.load_tokenizer", lambda model: tokenizer)
    model = tiny_model()
    policies = recipe.sweep(tiny_sink_gates(model), model, [])
    for text in ("", f"{recipe.instruction}\n\n"):
        before = encode(tokenizer, text, "beginning")
        row = np.array([*before, *tokenizer("One city is Paris.")["input_ids"]])
        assert [x.schedule.needs.prefix_of(row) for x in policies.values()] == [len(before)] * 4


@pytest.mark.slow
def test_gates_can_start_from_exported_ones(full_run, tmp_path):
    recipe = dataclasses.replace(
        parse([*ARGS, "--out", str(tmp_path / "run"), "--init", str(full_run.folder / "gates")])
    )
    with jax.set_mesh(make_mesh()):
        gates = recipe.begin(jax.jit(recipe.init)(full_run.model))
    for name, x in leaves_by_path(full_run.params).items():
        np.testing.assert_array_equal(x, leaves_by_path(gates)[name])


def test_initial_gates_determine_form_and_sizes(tmp_path):
    """A file or the command line may override them. The check refuses a run with other sizes."""
    with jax.set_mesh(make_mesh()):
        sizes = {"dim": 8, "sinks": 3, "form": "paper"}
        gates = jax.jit(lambda: SinkGate(2, 4, 1, 16, **sizes, rngs=nnx.Rngs(0)))()
    save_gates(tmp_path / "gates", gates, {"inputs": "k"})
    init, out = ["--init", str(tmp_path / "gates")], ["--out", str(tmp_path / "run")]
    (tmp_path / "own.yaml").write_text(
        f"method: fast_kvzip\nmodel: {MODEL}\ninit: {tmp_path / 'gates'}\nsinks: 5\n"
    )
    (tmp_path / "other.yaml").write_text(f"method: fast_kvzip\nmodel: {MODEL}\ndim: 4\n")
    for args, expected in (
        ([*ARGS, *init], (8, 3, "paper", "k")),
        ([*ARGS, *init, "--dim", "4", "--inputs", "hidden"], (4, 3, "paper", "hidden")),
        (["--config", str(tmp_path / "own.yaml")], (8, 5, "paper", "k")),
        (["--config", str(tmp_path / "other.yaml"), *init], (8, 3, "paper", "k")),
        (["--config", str(tmp_path / "other.yaml")], (4, 16, "sink", "hidden")),
    ):
        config = parse([*args, *out])
        assert (config.dim, config.sinks, config.form, config.inputs) == expected
    with pytest.raises(UserError, match=r"^--init .*gates: these gates have dim 8, the run's 4$"):
        check(parse([*ARGS, *init, "--dim", "4", "--out", str(tmp_path / "run")]))


def test_the_default_target_for_text_is_reconstruction(tmp_path):
    """This also holds for the built-in model, although its tasks have questions."""
    builtin = ["--method", "fast_kvzip", "--out", str(tmp_path / "run")]
    assert parse(builtin).target == "both"
    assert parse([*builtin, "--data", "texts"]).target == "reconstruction"
    assert parse([*builtin, "--data", "texts", "--target", "next_token"]).target == "next_token"
    assert parse([*builtin, "--data", "builtin"]).target == "both"


@pytest.mark.slow
def test_equal_runs_share_targets_and_other_runs_are_refused(full_run, tmp_path, capsys):
    folder = tmp_path / "run"
    args = [*ARGS[:-2], "--targets", str(full_run.folder / "targets"), "--mesh", "1", "--out", str(folder)]
    with pytest.raises(
        UserError, match="these targets are of target reconstruction, not next_token: name another folder"
    ):
        train(parse([*args, "--target", "next_token"]))
    with pytest.raises(UserError, match="these targets are of other contexts"):
        train(parse([*args, "--seed", "1"]))
    assert not (folder / SAVED).exists()
    train(parse(args))
    assert "all are there" in "".join(capsys.readouterr())
    assert losses(folder) == losses(full_run.folder)
    assert not (folder / "targets").exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--contexts", "0"], "--contexts must be at least 1, got 0"),
        (["--longest", "100"], "--longest must be above --shortest 10000, got 100"),
        (["--momentum", "1"], "--momentum must be at least 0 and below 1, got 1"),
        (["--targets", "mem"], "--targets must be disk, memory or a folder"),
        (["--targets", ""], "--targets must be disk, memory or a folder"),
        (["--targets", __file__], "--targets must be disk, memory or a folder"),
        (["--ratio", "0"], "--ratio must be above 0 and at most 1, got 0"),
        (["--target", "answer", "--data", "texts"], "--target answer: --data texts has no questions"),
        (["--single", "0", "--joins", "0"], "--single must be at least 1 where --joins is 0, got 0"),
    ],
)
def test_wrong_options_are_errors_of_one_line(wrong, message, tmp_path):
    with pytest.raises(UserError, match=message):
        parse([*ARGS, *wrong, "--out", str(tmp_path / "run")])


def refused_before_anything_is_read(args, folder, monkeypatch, message):
    def read(*_, **__):
        raise AssertionError("the model is read")

    monkeypatch.setattr("kvjax.train.run.load_model", read)
    with pytest.raises(UserError, match=message):
        train(parse([*ARGS, "--mesh", "1", "--out", str(folder), *args]))
    assert not (folder / SAVED).exists()


def test_too_few_positions_are_an_error_of_one_line(tmp_path, monkeypatch):
    message = r"^an update takes 1000 positions, and there are 199 to train on"
    refused_before_anything_is_read(["--batch", "1000"], tmp_path / "run", monkeypatch, message)


@pytest.mark.thorough
def test_two_processes_train_like_one(full_run, tmp_path):
    """Both compute the features, the first writes them, and each reads half of the positions."""
    run_processes(TRAIN, *ARGS, "--mesh", "2", "--out", str(tmp_path / "run"))
    assert losses(tmp_path / "run") == pytest.approx(losses(full_run.folder), rel=1e-5)


@pytest.mark.slow
def test_shares_of_the_targets_add_up_to_all_targets(full_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(targets, "TOKENS_TOGETHER", 1)  # one context after another
    folder = tmp_path / "targets"
    args = [*ARGS[:-2], "--mesh", "1", "--targets", str(folder), "--out", str(tmp_path / "run")]
    for shard in ("0/2", "1/2"):
        main([*args, "--shard", shard])
        assert f"share {shard} is in {folder}" in capsys.readouterr().out
        assert not (tmp_path / "run").exists()
        assert len(list(folder.glob("0*"))) == {"0/2": 2, "1/2": 4}[shard]
    train(parse(args))
    assert "all are there" in "".join(capsys.readouterr())
    assert losses(tmp_path / "run") == pytest.approx(losses(full_run.folder), rel=1e-5)


@pytest.mark.parametrize(("method", "shard"), [("fast_kvzip", "0/2"), ("wgkv", "0/1")])
def test_a_share_without_a_shared_folder_is_refused(method, shard):
    with pytest.raises(
        UserError, match=f"^--shard {shard} is for what a run computes before its first update"
    ):
        parse(["--method", method, "--shard", shard])
