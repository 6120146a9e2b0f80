"""Test runs of a recipe whose loss uses documents and labels: natural text and passkeys, from files and from the
built-in tasks."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from kvjax.builtin import builtin_model
from kvjax.cli.launch import MeshShape
from kvjax.errors import UserError
from kvjax.mesh import make_mesh
from kvjax.models import load_tokenizer
from kvjax.tasks import Mixture, builtin_text, builtin_vocabulary
from kvjax.tasks.mixture import builtin_mixture
from kvjax.train.batches import Rows, to_mesh
from kvjax.train.config import parse
from kvjax.train.data import FIRST_HELD_OUT, DataRequest
from kvjax.train.labelled import ANSWER_SHARES
from kvjax.train.loop import TokenCount
from kvjax.train.memory import batch_of
from kvjax.train.run import train
from tests.tiny_models import tiny_model
from tests.train.killed import go_on, run_until_killed
from tests.train.recipes.labelled_scale import Scale
from tests.train.texts import texts

ALL = Rows(np.arange(4), 4, 0)
MODEL = str(builtin_model("test_model"))
ARGS = [
    *("--method", "tests.train.recipes.labelled_scale:Scale", "--model", MODEL, "--dtype", "float32"),
    *("--lengths", "64", "128", "--batch", "4", "--sequences", "12", "--validation", "4", "--report", "none"),
    *("--checkpoint-every", "1"),
]
PASSKEYS = ["--data-kind", "passkeys", "--passkeys", "1", "--words", "2", "--lengths", "128", "192"]


@pytest.fixture
def two_sources(tmp_path):
    """Return a source of short documents and one of long ones."""
    for name in ("short", "long"):
        (tmp_path / name).mkdir()
    short = texts(tmp_path / "short", [f"The city of {i} is far. " * (1 + i % 3) for i in range(60)])
    return short, texts(tmp_path / "long", [f"Number {i} of the long ones. " * 40 for i in range(40)])


def steps_of(folder):
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line], [x["validation"] for x in lines if "validation" in x]


def open_recipe_data(data="builtin", rows=ALL, lengths=(64, 128, 64), validation=(64, 128), **options):
    """Open and return a run's data."""
    recipe = Scale(data=data, **options)
    tokenizer = None if data == "builtin" else load_tokenizer(MODEL)
    return recipe.open_data(
        DataRequest(data, rows, np.array(lengths), sorted(set(lengths)), np.array(validation), 5, tokenizer)
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["natural", "passkeys"])
def test_a_run_on_the_built_in_tasks(kind, tmp_path):
    """The run has three updates, in parts, on a mesh, and the loss of the labelled tokens."""
    out = tmp_path / "run"
    args = [*ARGS, "--data-kind", kind, "--out", str(out)]
    ended = train(parse([*args, "--mesh", "2", "--accumulate", "2"]))
    steps, validations = steps_of(out)
    assert [line["step"] for line in steps] == [0, 1, 2]
    assert [line["documents"] for line in steps] == [1, 1, 1]
    assert all(line["labelled"] == 1 if kind == "natural" else 0 < line["labelled"] < 0.3 for line in steps)
    assert kind == "natural" or validations[-1]["loss"] < validations[0]["loss"]
    assert sorted(x.shape for x in ended.held_out) == [(64,)] * 3 + [(128,)]
    assert all(isinstance(x, np.ndarray) for x in ended.held_out), "tokens, for a report"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [[], PASSKEYS])
def test_a_run_on_two_sources(kind, two_sources, tmp_path):
    args = [
        "--data",
        two_sources[0],
        "--also",
        two_sources[1],
        "--mix",
        "0.25",
        "0.75",
        *kind,
        "--out",
        str(tmp_path / "run"),
    ]
    train(parse([*ARGS, *args, "--mesh", "2"]))
    steps, _ = steps_of(tmp_path / "run")
    assert len(steps) == 3
    packed = [line["documents"] > 1 for line in steps]
    assert any(packed) != bool(kind), "packs have several documents, sequences with passkeys have one"
    for line, has_borders in zip(steps, packed, strict=True):
        assert 0 < line["labelled"] <= 1
        assert (line["labelled"] < 1) == (has_borders or bool(kind))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [[], PASSKEYS])
def test_a_killed_run_ends_like_an_uninterrupted_one(kind, two_sources, tmp_path):
    args = [
        *ARGS,
        "--data",
        two_sources[0],
        "--also",
        two_sources[1],
        "--mix",
        "1",
        "2",
        *kind,
        "--mesh",
        "1",
    ]
    resumed = go_on(run_until_killed(args, tmp_path / "run"), "2")
    uninterrupted = train(parse([*args, "--out", str(tmp_path / "whole")]))
    for actual, expected in zip(steps_of(tmp_path / "run")[0], steps_of(tmp_path / "whole")[0], strict=True):
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert (actual["documents"], actual["labelled"]) == pytest.approx(
            (expected["documents"], expected["labelled"])
        )
    assert resumed.validation.numbers == pytest.approx(uninterrupted.validation.numbers, rel=1e-5)


def test_each_built_in_task_is_one_document():
    data = open_recipe_data()
    steps = list(data.sequences)
    for index, step in enumerate(steps):
        length = (64, 128, 64)[index]
        np.testing.assert_array_equal(step["tokens"][1], builtin_mixture()(5, 4 * index + 1, length)[0])
        assert not step["document"].any()
        assert step["labelled"][:, 1:].all()
        assert not step["labelled"][:, 0].any()
    held_out_mixture = Mixture(builtin_vocabulary(), builtin_text("evaluate"))
    np.testing.assert_array_equal(data.held_out[1]["tokens"], held_out_mixture(5, FIRST_HELD_OUT + 1, 128)[0])


def test_only_the_answers_of_the_built_in_tasks_are_learned():
    """The labelled tokens are the answers to each sample's questions, one after another, as far as they fit."""
    data = open_recipe_data(data_kind="passkeys", lengths=(128,) * 12, validation=(128,) * 4)
    rows = [row for step in data.sequences for row in zip(step["tokens"], step["labelled"], strict=True)]
    for split, sequences, first in (
        ("train", rows, 0),
        ("evaluate", [(x["tokens"], x["labelled"]) for x in data.held_out], FIRST_HELD_OUT),
    ):
        sampler = Mixture(builtin_vocabulary(), builtin_text(split), ANSWER_SHARES)
        for index, (tokens, learned) in enumerate(sequences, first):
            sample = sampler.sample(5, index, 128)
            answers = np.concatenate([question.answer for question in sample.questions])
            learned_tokens = tokens[learned]
            assert len(learned_tokens) >= len(sample.questions[0].answer) >= 1, (
                "no sequence without a question"
            )
            np.testing.assert_array_equal(learned_tokens, answers[: len(learned_tokens)])
            start = len(sample.context) + len(sample.questions[0].prompt)
            assert np.flatnonzero(learned)[0] == start


@pytest.mark.parametrize("kind", ["natural", "passkeys"])
def test_built_in_rows_do_not_depend_on_the_processes(kind):
    steps = list(open_recipe_data(data_kind=kind).sequences)
    halves = [
        list(open_recipe_data(data_kind=kind, rows=Rows(np.arange(a, a + 2), 4, a // 2)).sequences)
        for a in (0, 2)
    ]
    for step, *parts in zip(steps, *halves, strict=True):
        for name, x in step.items():
            np.testing.assert_array_equal(x, np.concatenate([part[name] for part in parts]))


def test_passkeys_of_a_row_do_not_depend_on_the_processes(two_sources):
    """The passkeys' words are the same; each process has its own text around them."""
    options = {
        "data": two_sources[1],
        "data_kind": "passkeys",
        "passkeys": 2,
        "words": 3,
        "lengths": (256,) * 3,
    }
    options |= {"validation": (256,)}

    def answers(steps):
        return [
            [tokens[learned].tolist() for tokens, learned in zip(x["tokens"], x["labelled"], strict=True)]
            for x in steps
        ]

    all_answers = answers(open_recipe_data(**options).sequences)
    first, second = (
        answers(open_recipe_data(**options, rows=Rows(np.arange(a, a + 2), 4, a // 2)).sequences)
        for a in (0, 2)
    )
    assert [a + b for a, b in zip(first, second, strict=True)] == all_answers
    assert len({str(row) for step in all_answers for row in step}) == 12


def test_planned_batches_match_the_runs_batches(two_sources):
    mesh = make_mesh(fsdp=2)
    with jax.set_mesh(mesh):
        planned = batch_of(Scale(mesh=MeshShape(fsdp=2), batch=4), mesh, 64, tiny_model())
        for options in ({}, {"data": two_sources[0]}, {"data_kind": "passkeys"}):
            batch = to_mesh(mesh, Rows(np.arange(4), 4, 0), next(open_recipe_data(**options).sequences))
            assert batch.keys() == planned.keys()
            for name, x in planned.items():
                assert (x.shape, x.dtype, x.sharding) == (
                    batch[name].shape,
                    batch[name].dtype,
                    batch[name].sharding,
                )


def test_tokens_of_labelled_rows_are_counted():
    count = TokenCount(open_recipe_data().sequences, rows=4, tokens=True)
    assert [len(step) for step in count] == [3] * 3
    assert count.take() == 4 * (64 + 128 + 64)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--data", "a", "--also", "b", "--mix", "1"],
            r"--mix must be 2 weights, one for each of a, b, got \[1.0\]",
        ),
        (["--data", "a", "--also", "b"], r"--mix must be 2 weights, one for each of a, b, got \[\]"),
        (["--data", "a", "--mix", "1"], r"--mix must be left out without --also, got \[1.0\]"),
        (
            ["--data", "a", "--also", "b", "--mix", "1", "0"],
            r"--mix must be weights above 0, got \[1.0, 0.0\]",
        ),
        (["--data", "a", "--also", "b", "--mix", "1", "nan"], "--mix must be a number"),
        (
            ["--data", "a", "--also", "a", "--mix", "1", "1"],
            "--data and --also must be sources that are named once",
        ),
        (["--also", "b", "--mix", "1", "1"], "must be files or hub datasets, got builtin, b"),
        (["--passkeys", "21"], "--passkeys must be from 1 to 20, got 21"),
        (["--words", "0"], "--words must be at least 1, got 0"),
        (["--data", "a", "--passkeys", "5"], r"--passkeys must be left out where none are hidden .* got 5"),
        (["--data-kind", "passkeys", "--words", "8"], r"--words must be left out where .* got 8"),
    ],
)
def test_wrong_options_are_errors_of_one_line(args, message):
    with pytest.raises(UserError, match=message):
        parse([*ARGS, *args])


def test_sequences_too_short_for_passkeys_are_refused_before_anything_compiles(two_sources, tmp_path):
    args = ["--data", two_sources[1], "--data-kind", "passkeys", "--out", str(tmp_path / "run")]
    with pytest.raises(UserError, match=r"--lengths 64: 10 passkeys of 32 words .* take \d+ tokens"):
        train(parse([*ARGS, *args, "--mesh", "1"]))
    assert not (tmp_path / "run").exists()
    # 64 tokens are too few even though no held-out sequence has this length
    with pytest.raises(UserError, match="--lengths 64: 1 passkeys of 2 words"):
        open_recipe_data(
            data=two_sources[1],
            data_kind="passkeys",
            passkeys=1,
            words=2,
            lengths=(64, 256),
            validation=(256,),
        )
