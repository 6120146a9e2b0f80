"""Test KVPOP's runs: the two consecutive phases, the fixed and the scored mask, each group's own updates, the export,
and wrong options."""

import functools
import json
import math
import re
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import transformers

from kvjax.builtin import builtin_model
from kvjax.errors import UserError
from kvjax.mesh import make_mesh, put, use_mesh
from kvjax.models import load_model
from kvjax.policies import make_policy
from kvjax.train.__main__ import summary
from kvjax.train.batches import Rows, to_mesh
from kvjax.train.config import parse
from kvjax.train.recipe import Validation
from kvjax.train.recipes.kvpop import ConstantCache
from kvjax.train.run import train
from kvjax.train.update import initial_state, make_update
from tests.ahead.hlo import exchanged
from tests.models.pieces import ends
from tests.tiny_models import filled, tiny_config, tiny_model, tiny_scorers
from tests.train.killed import go_on, run_until_killed

MODEL = str(builtin_model("test_model"))
SIZES = dict(max_entries=14, window=6, sink=2, lengths=(32,), shares=(1.0,), sequences=32, batch=8)
COMMON = [
    *(
        "--method",
        "kvpop",
        "--dtype",
        "float32",
        "--mesh",
        "1",
        "--lengths",
        "64",
        "--batch",
        "4",
        "--sequences",
        "8",
    ),
    *("--validation", "2", "--report", "none"),
]
CACHE = ["--max-entries", "20", "--window", "6", "--sink", "2"]


@pytest.fixture(scope="module")
def uptrained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("up") / "run"
    return train(
        parse([*COMMON, "--model", MODEL, "--phase", "uptrain", "--lr", "1e-3", "--out", str(folder)])
    )


def second(uptrained, *more):
    """Return the arguments of the second phase."""
    return ["--phase", "sparsify", "--uptrained", str(uptrained.folder), *CACHE, *more]


def sparsify(uptrained, folder, *more):
    return train(parse([*COMMON, *second(uptrained, *more), "--out", str(folder)]))


@pytest.mark.slow
def test_the_second_phase_continues_from_the_first(uptrained, tmp_path):
    run = sparsify(uptrained, tmp_path / "run", "--scorer-warmup", "0")
    assert (
        "model: " + str(uptrained.folder / "parameters" / "model")
        in (tmp_path / "run/config.yaml").read_text()
    )
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    first = next(x for x in lines if x["step"] == 1 and "divergence" in x)
    assert first["divergence"] > 1e-3, "the student has less than the teacher"
    moved = [
        float(jnp.abs(x - y).max())
        for x, y in zip(jax.tree.leaves(run.model), jax.tree.leaves(uptrained.model), strict=True)
    ]
    assert 0 < max(moved) < 1e-3, "two small updates from the uptrained model"

    exported = tmp_path / "run" / "parameters"
    model = load_model(exported / "model")
    policy = make_policy("kvpop", gates=exported, model=model)
    assert (policy.window, policy.admission.max_entries) == (6, 20)
    assert policy.admission.made_for is not None
    with pytest.warns(UserWarning, match="made for the model .*, of which .* is a fine-tuned"):
        make_policy("kvpop", gates=exported, model=load_model(MODEL))


def test_exported_scorers_make_a_policy_and_have_their_validation(tmp_path):
    model = tiny_model()
    recipe, scorers = ConstantCache(**SIZES, phase="sparsify"), tiny_scorers(model)
    with use_mesh(model):
        recipe.export(tmp_path, scorers, model, Validation({"divergence": 0.5}, {}, 4))
    description = json.loads((tmp_path / "config.json").read_text())
    assert description["validation"] == {"divergence": 0.5, "sequences": 4}
    policy = make_policy("kvpop", gates=tmp_path, model=model)
    assert (policy.window, policy.admission.max_entries) == (6, 14)


@pytest.mark.slow
def test_transformers_reads_a_trained_model_and_computes_the_same(uptrained):
    torch = pytest.importorskip("torch")
    folder = uptrained.folder / "parameters" / "model"
    tokens = np.random.default_rng(0).integers(0, 60, (1, 40))
    twin = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = twin(torch.tensor(tokens)).logits.numpy()
    for model in (load_model(folder), uptrained.model):
        with use_mesh(model):
            np.testing.assert_allclose(ends(model, put(tokens))["logits"], expected, atol=1e-4)


@pytest.mark.parametrize(
    ("phase", "args", "rate"),
    [
        ("sparsify", ["--mask", "streaming"], 3e-6),
        ("sparsify", ["--mask", "streaming", "--lr", "1e-3"], 1e-3),
        ("sparsify", ["--mask", "streaming", "--lr", "1e-3", "--streaming-lr", "1e-4"], 1e-4),
        ("uptrain", [], 3e-5),
    ],
)
def test_the_streaming_mask_has_its_own_learning_rate(phase, args, rate):
    """Adam's first step is the rate; --lr on the command line overrides both rates."""
    before = ["--uptrained", MODEL] if phase == "sparsify" else []
    recipe = parse(["--method", "kvpop", "--mesh", "1", "--phase", phase, *before, *args])
    params = {"model": jnp.zeros(1)}
    tx = recipe.optimizer()
    change, _ = jax.jit(lambda x: tx.update(x, tx.init(params), params))({"model": jnp.ones(1)})
    assert float(change["model"][0]) == pytest.approx(-rate, rel=1e-3)


def test_the_summary_of_a_run_without_scorers_names_no_gates(tmp_path):
    """It names the cache that its model was trained for instead. After a dense run it says how to continue."""
    phases = [], ["--phase", "sparsify", "--uptrained", MODEL, "--mask", "streaming", *CACHE]
    summaries = []
    for args in phases:
        config = parse([*COMMON, "--model", MODEL, *args])
        trained = SimpleNamespace(validation=Validation({"loss": 0.5}, {}, 1), folder=tmp_path)
        summaries.append(summary(config, trained, config.deploy(None, tiny_model())))
        assert "--gates" not in summaries[-1]
    dense, fixed = summaries
    assert "--policy full --prompt-file FILE" in dense
    assert "--phase sparsify --uptrained FOLDER goes on" in dense
    assert "--policy streaming_llm:sink=2,window=18 --prompt-file FILE" in fixed
    assert "--policies full keydiff h2o expected_attention streaming_llm:calibrated --out FOLDER" in fixed
    assert "goes on" not in fixed


@pytest.mark.slow
def test_a_cache_of_all_tokens_has_no_divergence():
    """With a cache that holds every token, the student equals the teacher."""
    recipe = ConstantCache(phase="sparsify", **SIZES | {"max_entries": 64})
    with jax.set_mesh(make_mesh()):
        model = tiny_model()
        params = jax.jit(recipe.init)(model)
        tokens = jnp.asarray(np.random.default_rng(0).integers(0, 61, (8, 32)), jnp.int32)
        loss, scalars = jax.jit(lambda p, m: recipe.loss(p, m, tokens, jax.random.key(0), jnp.int32(0)))(
            params, model
        )
    assert float(scalars["divergence"]) == pytest.approx(0, abs=1e-6)
    assert float(scalars["score_loss"]) == 0
    assert float(loss) == pytest.approx(0.9 * float(scalars["cross_entropy"]), rel=1e-5)


def step(recipe, model, **others):
    """Return the largest change of the model's and of the scorers' parameters in one update, and the logged numbers."""
    with jax.set_mesh(make_mesh()):
        state = jax.jit(lambda model: initial_state(recipe, model))(model)
        before = jax.device_get(state.params)
        tokens = np.random.default_rng(0).integers(0, 61, (8, 32)).astype(np.int32)
        batch = to_mesh(make_mesh(), Rows(np.arange(8), 8, 0), tokens)
        state, numbers = make_update(recipe)(state, model, batch, np.int32(0))
        after = jax.device_get(state.params)
    change = jax.tree.map(lambda x, y: np.abs(x - y).max(), after, before)
    return {name: max(jax.tree.leaves(x)) for name, x in change.items()}, numbers


@pytest.mark.thorough
def test_model_and_scorers_have_their_own_learning_rates():
    """AdamW's first step is its rate, whatever the gradient; a warm-up from 0 keeps the scorers unchanged."""
    options = SIZES | {"phase": "sparsify", "lr": 1e-4, "scorer_lr": 1e-2}
    moved, numbers = step(ConstantCache(**options, scorer_warmup=0), tiny_model())
    assert moved["model"] == pytest.approx(1e-4, rel=0.05)
    assert moved["scorers"] == pytest.approx(1e-2, rel=0.05)
    assert 0 < float(numbers["agreement"]) < 1
    moved, _ = step(ConstantCache(**options, scorer_warmup=2), tiny_model())
    assert moved["model"] == pytest.approx(1e-4, rel=0.05)
    assert moved["scorers"] == 0


RAMP, UPDATES = 3, 12
"""Number of updates of the ramp of the scorers' rate, and of all updates."""


def optimizer(**options):
    """Return the optimizer of a recipe with `UPDATES` updates, and parameters of 2 to change."""
    defaults = {"phase": "sparsify", "sequences": UPDATES * 8, "scorer_warmup": RAMP, "weight_decay": 0.01}
    tx = ConstantCache(**SIZES | defaults | options).optimizer()
    params = {"scorers": {"a": jnp.full(3, 2.0), "c": jnp.full(1, 2.0)}, "model": {"down": jnp.full(4, 2.0)}}
    return tx, params


def moments(opt, which):
    """Return AdamW's moments by group."""
    groups_of_moments = [groups for _, groups in optax.tree_utils.tree_get_all_with_path(opt, which)]
    return {name: x for groups in groups_of_moments for name, x in groups.items() if jax.tree.leaves(x)}


@pytest.mark.parametrize("clipped_group", ["scorers", "model"])
def test_model_and_scorers_are_clipped_separately(clipped_group):
    """A gradient of norm 100 becomes one of norm 1, and the other's of norm .5 is unchanged. AdamW's means begin with
    .1 of it and with .05 of its square."""
    tx, params = optimizer()
    gradients = jax.tree.map(lambda x: np.full_like(x, 0.25), params)
    gradients[clipped_group] = jax.tree.map(lambda x: 200 * x, gradients[clipped_group])
    _, opt = jax.jit(lambda x: tx.update(x, tx.init(params), params))(gradients)
    for name in params:
        clipped = 0.5 if name == clipped_group else 0.25
        for which, expected in (("mu", 0.1 * clipped), ("nu", 0.05 * clipped**2)):
            for x in jax.tree.leaves(moments(opt, which)[name]):
                np.testing.assert_allclose(x, expected, rtol=1e-5)


def rates(**options):
    """Return the rates of each update and of two more, by group: for a constant gradient, AdamW's step is the rate."""
    tx, params = optimizer(**options)

    def update(opt, _):
        change, opt = tx.update(jax.tree.map(jnp.ones_like, params), opt, params)
        return opt, change

    _, changes = jax.jit(lambda: jax.lax.scan(update, tx.init(params), None, length=UPDATES + 2))()
    # parameters of 2 have a weight decay of .01 in addition
    return {name: np.asarray(jax.tree.leaves(x)[0])[:, 0] / -1.02 for name, x in changes.items()}


@pytest.mark.parametrize("peak", [1e-3, 1e-5])
def test_scorers_have_a_warmup_and_a_cosine_and_the_model_a_constant_rate(peak):
    """The scorers' rate rises from 0 to the peak, which it reaches after the ramp's last update, and falls to 8e-5, or
    to the peak if that is lower."""
    actual, end = rates(lr=3e-4, scorer_lr=peak), min(8e-5, peak)
    np.testing.assert_allclose(actual["model"], 3e-4, rtol=1e-3)
    updates = np.arange(RAMP, UPDATES + 1)
    fall = end + (peak - end) * (1 + np.cos(np.pi * (updates - RAMP) / (UPDATES - RAMP))) / 2
    expected = [*peak * np.arange(RAMP) / RAMP, *fall, end]
    np.testing.assert_allclose(actual["scorers"], expected, rtol=1e-3)


@pytest.mark.thorough
def test_no_array_holds_all_pairs_of_queries_and_keys():
    """The gradient of an update's loss over 8,192 tokens computes no array as large as each query with all the keys
    that it may see."""
    length, recipe = 8192, ConstantCache(phase="sparsify", lengths=(8192,), shares=(1.0,))
    with jax.set_mesh(make_mesh()):
        model = tiny_model(num_layers=1)
        params, tokens = jax.jit(recipe.init)(model), jnp.zeros((1, length), jnp.int32)
        key, step = jax.random.key(0), jnp.int32(0)
        gradient = jax.jit(jax.grad(lambda p, m: recipe.loss(p, m, tokens, key, step)[0]))
        text = gradient.lower(params, model).compile().as_text()
    sizes = [math.prod(map(int, shape.split(","))) for shape in re.findall(r"\w+\[([\d,]+)\]", text)]
    assert length * model.config.width <= max(sizes) < length * (recipe.window + recipe.max_entries - 68)


MESHES = {
    "8": {"fsdp": 8},
    "4x2": {"fsdp": 4, "tensor": 2},
    "2x2x2": {"data": 2, "fsdp": 2, "tensor": 2},
}


@functools.cache
def on_one_device(phase):
    """Return the numbers of five updates on one device."""
    return five_updates(phase, make_mesh())


def five_updates(phase, mesh, parts=1):
    """Return the logged numbers of five updates, each in `parts` parts."""
    options = SIZES | {"scorer_warmup": 2, "sequences": 40, "accumulate": parts}
    recipe, numbers = ConstantCache(phase=phase, **options), []
    with jax.set_mesh(mesh):
        model = tiny_model()
        state = jax.jit(lambda model: initial_state(recipe, model))(model)
        update, loaded = make_update(recipe), None if recipe.takes_model else model
        for step in range(5):
            tokens = np.random.default_rng(step).integers(0, 61, (8, 32)).astype(np.int32)
            state, scalars = update(
                state, loaded, to_mesh(mesh, Rows(np.arange(8), 8, 0), tokens), np.int32(step)
            )
            numbers.append({name: float(x) for name, x in scalars.items()})
    return numbers


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("phase", "name", "parts"),
    [
        ("uptrain", "2x2x2", 2),
        *(
            pytest.param(phase, *mesh, marks=pytest.mark.thorough)
            for phase in ("uptrain", "sparsify")
            for mesh in (("8", 1), ("4x2", 2), ("4x2", 1))
        ),
        pytest.param("sparsify", "2x2x2", 2, marks=pytest.mark.thorough),
    ],
)
def test_five_updates_are_equal_on_every_mesh(phase, name, parts):
    """This also holds for updates in several parts."""
    for actual, expected in zip(
        five_updates(phase, make_mesh(**MESHES[name]), parts), on_one_device(phase), strict=True
    ):
        assert actual == pytest.approx(expected, rel=1e-5)
    assert on_one_device(phase)[4]["loss"] != on_one_device(phase)[0]["loss"]


@pytest.mark.mesh
def test_parts_of_an_update_sum_large_gradients_over_data_once():
    def summed(parts):
        """Return the bytes that the devices of `data` sum in an update."""
        recipe, mesh = ConstantCache(**SIZES | {"accumulate": parts}), make_mesh(data=2)
        with jax.set_mesh(mesh):
            state = jax.jit(lambda: initial_state(recipe, tiny_model()))()
            batch = to_mesh(mesh, Rows(np.arange(8), 8, 0), np.zeros((8, 32), np.int32))
            text = make_update(recipe).lower(state, None, batch, np.int32(0)).compile().as_text()
        return exchanged(text)["all-reduce", "bytes"]

    print(summed(1), summed(2), summed(4))
    assert summed(4) < 1.2 * summed(1)


@pytest.mark.slow
def test_the_loss_adds_cross_entropy_divergence_and_score_loss():
    for scalars in on_one_device("sparsify"):
        model_loss = 0.9 * scalars["cross_entropy"] + 0.1 * scalars["divergence"]
        assert scalars["loss"] == pytest.approx(model_loss + scalars["score_loss"], rel=1e-6)
        assert min(scalars["divergence"], scalars["score_loss"]) > 1e-3, "either would be missed"


def test_the_streaming_mask_is_sinks_and_a_window_of_the_same_size():
    recipe = ConstantCache(phase="sparsify", mask="streaming", **SIZES)
    moved, numbers = step(recipe, tiny_model())
    assert moved.keys() == {"model"}
    assert "agreement" not in numbers
    assert float(numbers["divergence"]) > 0
    policy = recipe.deploy(None, tiny_model())
    assert policy.name == "streaming_llm"
    assert policy.window == 12
    np.testing.assert_array_equal(policy.admission.sink, 2)


def test_each_phase_has_the_papers_updates_by_default():
    args = ["--method", "kvpop", "--config", "kvpop-qwen3-4b"]
    up = parse(args)
    assert (up.steps, up.rows, up.most_tokens) == (5000, 128, 8192)
    later = parse([*args, "--phase", "sparsify", "--uptrained", "a/run"])
    assert (later.steps, later.model) == (2000, "a/run")
    assert parse([*args, "--sequences", "256"]).steps == 2


def test_an_uptrained_model_other_than_the_built_in_one_needs_its_own_options():
    """The default options are those for the built-in model."""
    args = ["--method", "kvpop", "--phase", "sparsify"]
    with pytest.raises(UserError, match="--uptrained Qwen/Qwen3-4B: needs --config or --model"):
        parse([*args, "--uptrained", "Qwen/Qwen3-4B"])
    assert parse([*args, "--uptrained", "Qwen/Qwen3-4B", "--model", "Qwen/Qwen3-4B"]).max_entries == 512
    assert [parse([*args, "--uptrained", x]).max_entries for x in ("builtin", MODEL)] == [256, 256]


@pytest.mark.mesh
def test_each_device_holds_an_eighth_of_the_bytes():
    """This holds for parameters, moments and gradients; the scorers are split only by kv heads."""
    recipe, mesh = ConstantCache(phase="sparsify", **SIZES), make_mesh(fsdp=2, tensor=4)
    with jax.set_mesh(mesh):
        model = filled(tiny_config(), jnp.bfloat16)
        state = jax.jit(lambda model: initial_state(recipe, model))(model)
        batch = to_mesh(mesh, Rows(np.arange(8), 8, 0), np.zeros((8, 32), np.int32))
        loss = lambda params: recipe.loss(params, model, batch, jax.random.key(0), jnp.int32(0))[0]  # noqa: E731
        gradients = jax.eval_shape(jax.grad(loss), state.params)
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    for group, shards in (("model", 8), ("scorers", 4)):
        for part in (state.params, moments(state.opt, "mu"), moments(state.opt, "nu")):
            leaves = jax.tree.leaves(part[group])
            total = sum(x.nbytes for x in leaves)
            first_device = sum(x.addressable_shards[0].data.nbytes for x in leaves)
            assert total / shards <= first_device < 1.2 * total / shards
    for gradient, param in zip(jax.tree.leaves(gradients), jax.tree.leaves(state.params), strict=True):
        assert gradient.sharding.spec == param.sharding.spec


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            ["--phase", "sparsify"],
            "--phase sparsify needs --uptrained, the folder of a run of --phase uptrain",
        ),
        (["--phase", "sparsify", "--uptrained", "no/such"], "no/such"),
        (["--uptrained", MODEL], "is for --phase sparsify: --phase uptrain makes it"),
        (["--max-entries", "68"], r"--max-entries must be at least sinks \+ window \+ 1 = 69, got 68"),
        (
            ["--phase", "sparsify", "--uptrained", MODEL, "--lengths", "512"],
            "--lengths 512 is not above --max-entries 512",
        ),
        (["--features", "none"], "--features none may be negative, so --normaliser must be xlstm"),
        (["--teacher", "store"], "--teacher store is for --phase sparsify: --phase uptrain has no teacher"),
        (
            ["--phase", "sparsify", "--uptrained", MODEL, "--teacher", "store", "--teacher-tokens", "9999"],
            "--teacher-tokens must be at most the model's .* where they are kept, got 9999",
        ),
        (["--age", "0"], "--age must be at least 1, got 0"),
        (["--distilled", "1.5"], "--distilled must be from 0 to 1, got 1.5"),
    ],
)
def test_wrong_options_are_errors_of_one_line(wrong, message, tmp_path):
    with pytest.raises(UserError, match=message):
        train(parse(["--method", "kvpop", "--model", MODEL, "--out", str(tmp_path / "run"), *wrong]))
    assert not (tmp_path / "run").exists()


STORED = "--teacher", "store", "--teacher-tokens", "16", "--scorer-warmup", "0"


@pytest.fixture(scope="module")
def stored(uptrained, tmp_path_factory):
    """Return a second phase with stored teacher outputs."""
    return sparsify(uptrained, tmp_path_factory.mktemp("stored") / "run", *STORED)


@pytest.fixture(scope="module")
def killed(uptrained, tmp_path_factory):
    """Return the folder of the same phase, killed while its second update is saved."""
    args = [*COMMON, *second(uptrained, *STORED, "--checkpoint-every", "1")]
    return run_until_killed(args, tmp_path_factory.mktemp("killed") / "run")


@pytest.mark.thorough
def test_a_killed_phase_ends_like_an_uninterrupted_one(stored, killed, tmp_path):
    resumed = go_on(shutil.copytree(killed, tmp_path / "run"), "1")
    assert metrics_of(resumed) == metrics_of(stored)
    jax.tree.map(
        np.testing.assert_array_equal, (resumed.params, resumed.model), (stored.params, stored.model)
    )
    assert resumed.validation.numbers == stored.validation.numbers


@pytest.mark.thorough
def test_a_killed_phase_resumes_on_another_mesh(stored, killed, tmp_path):
    """The resumed run has four devices."""
    resumed = go_on(shutil.copytree(killed, tmp_path / "run"), "2x2")
    assert metrics_of(resumed)[1] == pytest.approx(metrics_of(stored)[1], rel=1e-5)
    assert resumed.validation.numbers == pytest.approx(stored.validation.numbers, rel=1e-4)
    # where a gradient is only rounding, Adam still makes a full step; one update moves a weight by 8e-5
    ends = zip(*(jax.tree.leaves(x.model) for x in (resumed, stored)), strict=True)
    differences = np.concatenate([np.abs(np.asarray(actual) - expected).ravel() for actual, expected in ends])
    assert differences.mean() < 2e-6


@pytest.mark.slow
def test_an_unfinished_run_cannot_be_sparsified(uptrained, tmp_path):
    unfinished = shutil.copytree(
        uptrained.folder, tmp_path / "run", ignore=shutil.ignore_patterns("parameters")
    )
    args = ["--method", "kvpop", "--phase", "sparsify", "--uptrained", str(unfinished)]
    with pytest.raises(
        UserError, match="--uptrained .* this run is not finished, .* has no parameters/model; .*export"
    ):
        parse(args)


def metrics_of(run):
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    names = "loss", "cross_entropy", "divergence", "score_loss", "agreement"
    return [{name: x[name] for name in names} for x in lines if "divergence" in x]


@pytest.mark.thorough
def test_stored_teacher_outputs_replace_the_teacher(uptrained, stored, tmp_path):
    """The run has no teacher's weights, and its losses are the same up to half precision."""
    with_teacher = sparsify(uptrained, tmp_path / "beside", *STORED[2:])
    for actual, expected in zip(metrics_of(stored), metrics_of(with_teacher), strict=True):
        assert actual == pytest.approx(expected, rel=2e-3)
    assert stored.validation.numbers == pytest.approx(with_teacher.validation.numbers, rel=2e-3, abs=1e-4)
    assert len(list((stored.folder / "teacher").glob("??/*.npz"))) == 8 + 2, "sequences, and those held out"
