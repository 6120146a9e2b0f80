"""Test the program that makes the built-in model, and the model that it made."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.builtin import builtin_model
from kvjax.mesh import make_mesh
from kvjax.models import load_model
from kvjax.models.rope import cos_sin
from kvjax.tasks import Copy, Mixture, Needle, Recall, Text, builtin_task, builtin_text, builtin_vocabulary
from kvjax.tasks.builtin import encode_files, split_files
from train.builtin.__main__ import (
    Recipe,
    Stage,
    as_model,
    config,
    optimizer,
    recipes,
    template_of,
    train,
    write_model,
)
from train.builtin.scores import best_single_head, score
from train.builtin.text import VOCABULARY, hold_out, train_tokenizer
from train.builtin.weights import (
    MIN_MARGIN,
    initial_weights,
    margins,
    record_matchers,
    settle_margins,
    trained,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def small() -> Recipe:
    sizes = config(builtin_vocabulary(), layers=2, width=64, mlp_width=32, heads=4, kv_heads=4, head_dim=16)
    return Recipe(sizes, record_matchers(1), (Stage(128, 2, 4), Stage(160, 1, 2)))


@pytest.fixture(scope="module", autouse=True)
def one_device():
    with jax.set_mesh(make_mesh()):
        yield


def test_the_first_layers_heads_start_looking_none_to_three_places_back():
    vocabulary = builtin_vocabulary()
    recipe = recipes(vocabulary)["model"]
    weights = initial_weights(recipe.config, recipe.matchers, vocabulary, seed=0)
    model = as_model(template_of(recipe), weights)
    tokens = jnp.asarray(builtin_text("evaluate")[None, :64])
    angles = cos_sin(recipe.config.rope, recipe.config.head_dim, jnp.arange(64)[None])
    layer = jax.tree.map(lambda leaf: leaf[0], model.layers)
    projected = layer.project(model.embed_tokens(tokens), angles)
    q, k = projected["q"], projected["k"]
    for offset in range(4):
        logits = np.where(np.tri(64), np.asarray(q[0, 2 * offset] @ k[0, offset].T), -np.inf)
        behind = np.arange(64) - logits.argmax(-1)
        assert (behind[8:] == offset).all()


def test_fixed_weights_stay_and_the_rest_is_trained():
    recipe = recipes(builtin_vocabulary())["model"]
    initial = initial_weights(recipe.config, recipe.matchers, builtin_vocabulary(), seed=0)
    weights = {name: jnp.asarray(array) for name, array in initial.items()}
    rng = np.random.default_rng(0)
    gradient = {
        name: jnp.asarray(rng.normal(size=array.shape), jnp.float32) for name, array in initial.items()
    }
    tx = optimizer(recipe)
    _, state = tx.update(gradient, tx.init(weights), weights)
    change, _ = tx.update(gradient, state, weights)  # the first update's learning rate is 0
    masks = trained(recipe.config, recipe.matchers)
    for name, array in change.items():
        moves = np.broadcast_to(masks.get(name, 1), array.shape) > 0
        np.testing.assert_array_equal(np.asarray(array) != 0, moves, err_msg=name)
    for m in recipe.matchers:
        moved = np.asarray(change["k"])[m.layer, :, m.head]
        fast = moved.reshape(len(moved), 2, 2, -1)[:, :, 0]
        assert not fast.any()
        assert moved.any() == (m.question_type is None)


def test_margins_are_settled_where_gates_can_learn():
    """Nine of ten right keys win by the wanted margin, and no more."""
    vocabulary = builtin_vocabulary()
    recipe = recipes(vocabulary)["model"]
    weights = initial_weights(recipe.config, recipe.matchers, vocabulary, seed=0)
    task, make = Recall(vocabulary, builtin_text("train")), partial(as_model, template_of(recipe))
    settled = settle_margins(weights, make, recipe.matchers, task, length=256, samples=2)
    for values in margins(make(settled), recipe.matchers, task, 256, 2):
        assert abs(np.quantile(values, 0.1) - MIN_MARGIN) < 0.1


@pytest.mark.thorough
def test_a_stopped_run_resumes_to_the_same_weights(small, tmp_path):
    stream = Mixture(builtin_vocabulary(), builtin_text("train"))
    uninterrupted = train(small, stream, tmp_path / "whole.npz", save_every=2)

    class Stopped(Exception):
        pass

    def stop(step, losses):
        if step == 3:
            raise Stopped

    with pytest.raises(Stopped):
        train(small, stream, tmp_path / "stopped.npz", save_every=2, report=stop)
    resumed = []
    resumed_model = train(
        small,
        stream,
        tmp_path / "stopped.npz",
        save_every=2,
        report=lambda step, losses: resumed.append(step),
    )
    assert resumed == [2, 3, 4, 5]
    for actual, expected in zip(jax.tree.leaves(uninterrupted), jax.tree.leaves(resumed_model), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_training_and_held_out_files_are_disjoint_and_the_tokenizer_is_lossless(tmp_path):
    files = {f"module_{i}.py": f"def f{i}(x):\n    return x + {i}  # é\n" * 300 for i in range(80)}
    sources, packaged = hold_out(files)
    heldout = split_files(packaged)
    assert heldout
    assert sorted([*sources, *heldout.values()]) == sorted(files.values())
    assert all(files[path] == source for path, source in heldout.items())
    assert len(packaged.encode()) < 300_000

    tokenizer = train_tokenizer(sources)
    text = encode_files(tokenizer, heldout.values())
    assert tokenizer.decode(text.tolist(), skip_special_tokens=True) == "".join(heldout.values())


def test_a_written_folder_loads_with_its_card_and_replaces_the_old_one(small, tmp_path):
    from tokenizers import Tokenizer

    vocabulary = builtin_vocabulary()
    tokenizer = Tokenizer.from_file(str(builtin_model() / "tokenizer.json"))
    model = as_model(template_of(small), initial_weights(small.config, small.matchers, vocabulary, seed=0))
    folder = tmp_path / "model"
    for card in ("old", "new"):
        write_model(model, tokenizer, vocabulary, card, folder)
    loaded = load_model(folder)
    np.testing.assert_array_equal(loaded.embed[...], model.embed[...])
    assert (folder / "MODEL_CARD.md").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(("name", "most_bytes"), [("model", 5_000_000), ("test_model", 500_000)])
def test_packaged_folders_are_small_and_complete(name, most_bytes):
    from transformers import AutoTokenizer

    folder = builtin_model(name)
    assert sum(file.stat().st_size for file in folder.iterdir()) <= most_bytes
    assert (folder / "MODEL_CARD.md").read_text(encoding="utf-8").startswith("# The built-in model")
    settings = json.loads((folder / "config.json").read_text())
    assert settings["vocab_size"] == VOCABULARY
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token_id == settings["eos_token_id"] == builtin_vocabulary().end
    assert tokenizer.bos_token_id == settings["bos_token_id"] == builtin_vocabulary().begin
    source = "def f(self):\n    return 'é'\n"
    begin, *ids = tokenizer(source)["input_ids"]
    assert begin == tokenizer.bos_token_id
    assert tokenizer.decode(ids) == source


def test_the_packaged_text_is_small_and_names_its_owner():
    file = Path(builtin_model()).parent / "heldout.txt"
    assert file.stat().st_size <= 300_000
    assert "Python Software Foundation" in file.read_text(encoding="utf-8").splitlines()[0]


@pytest.mark.thorough
def test_the_packaged_model_answers_and_no_single_head_suffices():
    model = load_model(builtin_model())
    task = builtin_task(Recall)
    scores = score(model, task, 1024, 16)
    assert min(scores.values()) >= 0.93
    assert scores["all"] >= 0.95
    assert best_single_head(model, task, 256, 4)[1] <= 0.5
    assert score(model, builtin_task(Needle), 1024, 8)["all"] >= 0.93
    assert score(model, builtin_task(Copy), 1024, 8)["all"] >= 0.9
    assert score(model, builtin_task(Text), 1024, 16)["bits per byte"] <= 1.9
