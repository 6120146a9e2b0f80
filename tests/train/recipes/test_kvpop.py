"""KVPOP's runs: the two phases one after the other, the fixed mask beside the scored one, each group's own updates,
what is exported, and wrong options."""

import json
import math
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.builtin import builtin_model
from kvjax.errors import Doubt, UserError
from kvjax.mesh import make_mesh
from kvjax.models import load_model
from kvjax.policies import make_policy
from kvjax.train.config import parse
from kvjax.train.loop import train
from kvjax.train.recipes.kvpop import ConstantCache
from kvjax.train.rows import Rows, to_mesh
from kvjax.train.update import initial_state, make_update
from tests.tiny_models import filled, tiny_config, tiny_model

MODEL = str(builtin_model("test_model"))
SIZES = dict(budget=14, window=6, sink=2, lengths=(32,), shares=(1.0,), sequences=32, batch=8)
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
CACHE = ["--budget", "20", "--window", "6", "--sink", "2"]


@pytest.fixture(scope="module")
def uptrained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("up") / "run"
    return train(
        parse([*COMMON, "--model", MODEL, "--phase", "uptrain", "--lr", "1e-3", "--out", str(folder)])
    )


def sparsify(uptrained, folder, *more):
    told = ["--phase", "sparsify", "--uptrained", str(uptrained.folder), *CACHE, *more]
    return train(parse([*COMMON, *told, "--out", str(folder)]))


def test_the_second_phase_goes_on_from_the_first(uptrained, tmp_path):
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
    assert 0 < max(moved) < 1e-3, "from there, by two small updates"

    exported = tmp_path / "run" / "parameters"
    model = load_model(exported / "model")
    policy = make_policy("kvpop", gates=exported, model=model)
    assert (policy.window, policy.admission.budget) == (6, 20)
    assert policy.admission.made_for is not None
    with pytest.warns(Doubt, match="made for the model .*, of which .* is a fine-tuned"):
        make_policy("kvpop", gates=exported, model=load_model(MODEL))


def test_with_the_whole_in_view_there_is_nothing_to_distil(uptrained):
    """The student is then the teacher: of a budget that holds every token."""
    recipe = ConstantCache(phase="sparsify", **SIZES | {"budget": 64})
    with jax.set_mesh(make_mesh()):
        model = tiny_model()
        params = jax.jit(recipe.init)(model)
        tokens = jnp.asarray(np.random.default_rng(0).integers(0, 61, (8, 32)), jnp.int32)
        loss, found = jax.jit(lambda p, m: recipe.loss(p, m, tokens, jax.random.key(0), jnp.int32(0)))(
            params, model
        )
    assert float(found["divergence"]) == pytest.approx(0, abs=1e-6)
    assert float(found["score_loss"]) == 0
    assert float(loss) == pytest.approx(0.9 * float(found["cross_entropy"]), rel=1e-5)


def step(recipe, model, **others):
    """One update's change of the model's and the scorers' parameters."""
    with jax.set_mesh(make_mesh()):
        state = jax.jit(lambda model: initial_state(recipe, model))(model)
        before = jax.device_get(state.params)
        tokens = np.random.default_rng(0).integers(0, 61, (8, 32)).astype(np.int32)
        batch = to_mesh(make_mesh(), Rows(0, 8, 8), tokens)
        state, numbers = make_update(recipe)(state, model, batch, np.int32(0))
        after = jax.device_get(state.params)
    change = jax.tree.map(lambda x, y: np.abs(x - y).max(), after, before)
    return {name: max(jax.tree.leaves(x)) for name, x in change.items()}, numbers


def test_model_and_scorers_have_rates_of_their_own():
    """AdamW's first step is its rate, whatever the gradient; a warm-up from 0 holds the scorers back."""
    told = SIZES | {"phase": "sparsify", "lr": 1e-4, "scorer_lr": 1e-2}
    moved, numbers = step(ConstantCache(**told, scorer_warmup=0), tiny_model())
    assert moved["model"] == pytest.approx(1e-4, rel=0.05)
    assert moved["scorers"] == pytest.approx(1e-2, rel=0.05)
    assert 0 < float(numbers["agreement"]) < 1
    moved, _ = step(ConstantCache(**told, scorer_warmup=2), tiny_model())
    assert moved["model"] == pytest.approx(1e-4, rel=0.05)
    assert moved["scorers"] == 0


def test_no_array_is_of_all_pairs():
    """What the gradient of an update's loss over 8,192 tokens computes: nothing as large as each query with all that it
    may see."""
    length, recipe = 8192, ConstantCache(phase="sparsify", lengths=(8192,), shares=(1.0,))
    with jax.set_mesh(make_mesh()):
        model = tiny_model(num_layers=1)
        params, tokens = jax.jit(recipe.init)(model), jnp.zeros((1, length), jnp.int32)
        key, at = jax.random.key(0), jnp.int32(0)
        gradient = jax.jit(jax.grad(lambda p, m: recipe.loss(p, m, tokens, key, at)[0]))
        text = gradient.lower(params, model).compile().as_text()
    sizes = [math.prod(map(int, shape.split(","))) for shape in re.findall(r"\w+\[([\d,]+)\]", text)]
    assert length * model.config.width <= max(sizes) < length * (recipe.window + recipe.budget - 68)


MESHES = {"8": {"fsdp": 8}, "4x2": {"fsdp": 4, "tensor": 2}}


@pytest.fixture(scope="module")
def alone():
    """Five updates of each phase on one device."""
    return {phase: five(phase, make_mesh()) for phase in ("uptrain", "sparsify")}


def five(phase, mesh):
    """What is logged of five updates."""
    recipe, numbers = ConstantCache(phase=phase, **SIZES | {"scorer_warmup": 2, "sequences": 40}), []
    with jax.set_mesh(mesh):
        model = tiny_model()
        state = jax.jit(lambda model: initial_state(recipe, model))(model)
        update, read = make_update(recipe), None if recipe.takes_model else model
        for at in range(5):
            tokens = np.random.default_rng(at).integers(0, 61, (8, 32)).astype(np.int32)
            state, found = update(state, read, to_mesh(mesh, Rows(0, 8, 8), tokens), np.int32(at))
            numbers.append({name: float(x) for name, x in found.items()})
    return numbers


@pytest.mark.parametrize("phase", ["uptrain", "sparsify"])
@pytest.mark.parametrize("name", [pytest.param("8", marks=pytest.mark.thorough), "4x2"])
def test_five_updates_are_equal_on_every_mesh(alone, phase, name):
    for mine, theirs in zip(five(phase, make_mesh(**MESHES[name])), alone[phase], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    assert alone[phase][4]["loss"] != alone[phase][0]["loss"]


def test_the_fixed_mask_is_sinks_and_a_window_of_the_same_size():
    recipe = ConstantCache(phase="sparsify", mask="streaming", **SIZES)
    moved, numbers = step(recipe, tiny_model())
    assert moved.keys() == {"model"}
    assert "agreement" not in numbers
    assert float(numbers["divergence"]) > 0
    policy = recipe.deploy(None, tiny_model())
    assert policy.name == "streaming_llm"
    assert policy.window == 12
    np.testing.assert_array_equal(policy.admission.sink, 2)


def test_each_phase_has_the_papers_updates_unless_told():
    told = ["--method", "kvpop", "--config", "kvpop-qwen3-4b"]
    up = parse(told)
    assert (up.steps, up.rows, up.most_tokens) == (5000, 128, 8192)
    later = parse([*told, "--phase", "sparsify", "--uptrained", "a/run"])
    assert (later.steps, later.model) == (2000, "a/run")
    assert parse([*told, "--sequences", "256"]).steps == 2


def test_bytes_of_each_device_are_an_eighth():
    """Parameters, moments and master weights, of the model and, by kv heads, of the scorers."""
    recipe, mesh = ConstantCache(phase="sparsify", **SIZES), make_mesh(fsdp=2, tensor=4)
    with jax.set_mesh(mesh):
        model = filled(tiny_config(), jnp.bfloat16)
        state = jax.jit(lambda model: initial_state(recipe, model))(model)
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    for part, shards in ((state.params["model"], 8), (state.params["scorers"], 4), (state.opt, 4)):
        leaves = jax.tree.leaves(part)
        total = sum(x.nbytes for x in leaves)
        own = sum(x.addressable_shards[0].data.nbytes for x in leaves)
        assert own < 1.2 * total / shards


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            ["--phase", "sparsify"],
            "--phase sparsify needs --uptrained, the folder of a run of --phase uptrain",
        ),
        (["--phase", "sparsify", "--uptrained", "no/such"], "no/such"),
        (["--uptrained", MODEL], "is for --phase sparsify: --phase uptrain makes it"),
        (["--budget", "68"], r"--budget must be at least sinks \+ window \+ 1 = 69, got 68"),
        (
            ["--phase", "sparsify", "--uptrained", MODEL, "--lengths", "512"],
            "--lengths 512 is not above --budget 512",
        ),
        (["--features", "none"], "--features none may be negative, for which --normaliser must be xlstm"),
        (["--teacher", "store"], "--teacher store is for --phase sparsify: --phase uptrain has no teacher"),
        (
            ["--phase", "sparsify", "--uptrained", MODEL, "--teacher", "store", "--teacher-tokens", "9999"],
            "--teacher-tokens must be at most the model's .* where they are kept, got 9999",
        ),
        (["--age", "0"], "--age must be at least 1, got 0"),
        (["--distilled", "1.5"], "--distilled must be from 0 to 1, got 1.5"),
    ],
)
def test_wrong_options_are_one_line(wrong, said, tmp_path):
    with pytest.raises(UserError, match=said) as error:
        train(parse(["--method", "kvpop", "--model", MODEL, "--out", str(tmp_path / "run"), *wrong]))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_killed_phase_goes_on_on_another_mesh(uptrained, tmp_path):
    """From its first update's checkpoint, on four devices; stopped as `SIGKILL` would, with what is on the disk."""
    told = "--teacher", "store", "--teacher-tokens", "16", "--scorer-warmup", "0", "--checkpoint-every", "1"
    whole = sparsify(uptrained, tmp_path / "whole", *told, "--keep", "9")
    left = tmp_path / "left"
    shutil.copytree(whole.folder, left, ignore=shutil.ignore_patterns("parameters", "2"))
    config = (left / "config.yaml").read_text().replace(str(whole.folder), str(left))
    (left / "config.yaml").write_text(config)
    resumed = train(parse(["--resume", "--out", str(left), "--mesh", "2x2"]))
    assert metrics_of(resumed)[1] == pytest.approx(metrics_of(whole)[1], rel=1e-5)
    assert resumed.validation.numbers == pytest.approx(whole.validation.numbers, rel=1e-4)
    # where a gradient is rounding alone Adam makes a step of it; one update moves a weight by 8e-5
    ends = zip(*(jax.tree.leaves(x.model) for x in (resumed, whole)), strict=True)
    apart = np.concatenate([np.abs(np.asarray(mine) - theirs).ravel() for mine, theirs in ends])
    assert apart.mean() < 2e-6


def metrics_of(run):
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: x[name] for name in ("cross_entropy", "divergence")} for x in lines if "divergence" in x]


def test_what_the_teacher_said_stands_in_for_it(uptrained, tmp_path):
    """No weights of a teacher are there, and the losses are those that they would give, but for half precision."""
    told = "--teacher-tokens", "16", "--scorer-warmup", "0"
    beside = sparsify(uptrained, tmp_path / "beside", *told)
    kept = sparsify(uptrained, tmp_path / "kept", *told, "--teacher", "store")
    for mine, theirs in zip(metrics_of(kept), metrics_of(beside), strict=True):
        assert mine == pytest.approx(theirs, rel=2e-3)
    assert kept.validation.numbers == pytest.approx(beside.validation.numbers, rel=2e-3, abs=1e-4)
    assert len(list((tmp_path / "kept/teacher").glob("??/*.npz"))) == 8 + 2, "sequences, and those held out"
