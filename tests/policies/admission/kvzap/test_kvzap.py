"""Test KVzap: the surrogate and the entries that both policies keep against float64, and files."""

import re

import jax
import numpy as np
import pytest

from kvjax.checkpoints.published import find_gates
from kvjax.errors import UserError
from kvjax.evaluate.gates import gates_of_method
from kvjax.inference import prefill
from kvjax.mesh import HEADS, make_mesh, put, use_mesh
from kvjax.policies import make_policy
from kvjax.policies.admission.kvzap import load_gates, save_gates
from kvjax.policies.eviction.kvzap import WINDOW
from tests.policies.admission.kvzap.published import HEADS as HEADS_OF_MODEL
from tests.policies.admission.kvzap.published import LAYERS, WIDTH, predictions, write_published
from tests.policies.captured import PAGE, captured_layers, entries
from tests.tiny_models import sliding_model, tiny_model, tiny_surrogates

FORMS = pytest.mark.parametrize("hidden", [12, None], ids=["two layers", "linear"])


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@FORMS
def test_predictions_are_the_published_ones(tmp_path, hidden):
    arrays = write_published(tmp_path, hidden)
    gates, _ = load_gates(tmp_path)
    x = np.random.default_rng(0).standard_normal((7, WIDTH)).astype(np.float32)
    assert gates.shape == (LAYERS, HEADS_OF_MODEL, WIDTH)
    with use_mesh():
        for layer in range(LAYERS):
            own = jax.tree.map(lambda leaf, layer=layer: put(np.asarray(leaf)[layer]), gates)
            found = jax.jit(lambda gate, x: gate(x))(own, x[None])[0]
            np.testing.assert_allclose(found, predictions(arrays, layer, x), atol=1e-5)


def test_the_reference_matches_a_prediction_by_hand(tmp_path):
    """One hidden unit of 2 and one of −1: GELU(2) = 1.9545 and GELU(−1) = −0.1587, weighed by 1 and 10, plus 0.5."""
    arrays = write_published(tmp_path, 2)
    arrays = {name: np.zeros_like(x) for name, x in arrays.items()}
    arrays["layers.0.0.bias"] = np.array([2.0, -1.0])
    arrays["layers.0.2.weight"][1] = 1, 10
    arrays["layers.0.2.bias"][1] = 0.5
    found = predictions(arrays, 0, np.ones((1, WIDTH)))[:, 0]
    np.testing.assert_allclose(found, [0, 1.9545 - 1.5866 + 0.5, 0, 0], atol=1e-4)


@FORMS
def test_an_admission_keeps_the_tokens_that_reach_the_threshold(tmp_path, model, hidden):
    """This is checked in the first layer, whose inputs do not depend on decisions. The newest tokens are in the local
    window."""
    arrays, row, window = write_published(tmp_path, hidden), np.random.default_rng(1).permutation(61)[:40], 9
    c = captured_layers(model, row)[0]
    expected = predictions(arrays, 0, c.hidden) >= -0.3
    policy = make_policy(f"kvzap:threshold=-0.3,window={window}", model=model, gates=str(tmp_path))
    cache = prefill(model, [row], policy=policy, page_size=PAGE)
    left = len(row) - (window - 1)
    assert 0.2 < expected[:, :left].mean() < 0.8
    for head, keeps in enumerate(expected):
        np.testing.assert_allclose(entries(cache, 0, 0, head), c.k[head, :left][keeps[:left]], atol=1e-5)


def test_an_eviction_keeps_the_same_after_a_dense_prefill(tmp_path, model):
    """All layers see every token of the prompt. The newest 128 entries stay."""
    arrays, row = write_published(tmp_path, 12), np.random.default_rng(1).integers(0, 61, 190)
    policy = make_policy("kvzap_eviction:threshold=0.2", model=model, gates=str(tmp_path))
    cache = prefill(model, [row], policy=policy, page_size=PAGE)
    dropped = []
    for layer, c in enumerate(captured_layers(model, row)):
        for head, score in enumerate(predictions(arrays, layer, c.hidden)):
            keeps = (score >= 0.2) | (np.arange(len(row)) >= len(row) - WINDOW)
            dropped.append((~keeps).sum())
            np.testing.assert_allclose(entries(cache, layer, 0, head), c.k[head, keeps], atol=1e-4)
    assert np.mean(np.array(dropped) > 0) > 0.5


@pytest.mark.parametrize("hidden", [12, 0])
def test_gates_survive_a_round_trip(tmp_path, model, hidden):
    gates = tiny_surrogates(model, hidden=hidden)
    save_gates(tmp_path / "gates", gates, {"threshold": -2.0})
    read, description = load_gates(tmp_path / "gates")
    assert (description["method"], description["threshold"], read.hidden) == ("kvzap", -2.0, hidden)
    jax.tree.map(np.testing.assert_array_equal, read, gates)


def test_only_outputs_are_split_by_head(tmp_path, model):
    save_gates(tmp_path, tiny_surrogates(model), {})
    with jax.set_mesh(make_mesh(fsdp=2, tensor=4)):
        read, _ = load_gates(tmp_path)
    assert read.w2[...].sharding.spec[1] == HEADS
    assert HEADS not in read.w1[...].sharding.spec


def test_the_folders_threshold_and_rate_are_the_defaults(tmp_path, model):
    rate = np.full((LAYERS, HEADS_OF_MODEL), 0.25)
    save_gates(tmp_path, tiny_surrogates(model), {"threshold": -2.0, "rate": rate.tolist()})
    for text, threshold, expected in (
        ("kvzap", -2, 0.25),
        ("kvzap:threshold=-1", -1, 0.25),
        ("kvzap:threshold=-3", -3, 1),
    ):
        admission = make_policy(text, model=model, gates=str(tmp_path)).admission
        assert admission.threshold == threshold
        np.testing.assert_allclose(admission.rate, expected)


@pytest.mark.parametrize("threshold", ["low", [1, 2], float("nan")])
def test_a_folders_threshold_must_be_a_number(tmp_path, model, threshold):
    save_gates(tmp_path, tiny_surrogates(model), {"threshold": threshold})
    with pytest.raises(UserError, match="^kvzap: threshold must be a finite number"):
        make_policy("kvzap:threshold=-4", model=model, gates=str(tmp_path))


def test_a_published_folder_is_found_and_belongs_to_kvzap(tmp_path, monkeypatch):
    write_published(tmp_path, None)
    fetched = []

    def fetch(hub_id, patterns, what):
        fetched.append(patterns)
        return tmp_path

    monkeypatch.setattr("kvjax.checkpoints.published.fetch", fetch)
    assert find_gates("nvidia/KVzap-linear-Qwen3-8B", "Qwen/Qwen3-8B") == str(tmp_path)
    find_gates("Qwen/Qwen3-8B", "Qwen/Qwen3-8B")
    assert ["model.safetensors" in patterns for patterns in fetched] == [True, False], "not a model's weights"
    for method in ("kvzap", "kvzap_eviction"):
        assert gates_of_method([str(tmp_path)], method) == (str(tmp_path),)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "these are no KVzap gates.*the method is llama"),
        ({"hidden_dim": 13}, r"b1 should have shape \(3, 13\), found \(3, 12\)"),
        ({"hidden_dim": None}, "these are no KVzap gates.*layers.0.weight"),
        ({"n_modules": 4}, "these are no KVzap gates.*layers.3.0.weight"),
        ({"output_dim": "4"}, "these are no KVzap gates.*output_dim must be"),
    ],
)
def test_invalid_folders_are_refused_in_one_line(tmp_path, changes, message):
    write_published(tmp_path, 12, **changes)
    with pytest.raises(UserError, match=message):
        load_gates(tmp_path)


def test_gates_of_another_model_or_without_threshold_are_refused(tmp_path, model):
    write_published(tmp_path, 12)
    with pytest.raises(UserError, match=r"^kvzap: these gates have no threshold, and none is given"):
        make_policy("kvzap", model=model, gates=str(tmp_path))
    for policy in ("kvzap:threshold=-4", "kvzap_eviction:threshold=-4"):
        with pytest.raises(UserError, match=re.escape("= (3, 4, 32), the model has (2, 4, 32)")):
            make_policy(policy, model=tiny_model(num_layers=2), gates=str(tmp_path))
        make_policy(policy, model=sliding_model(), gates=str(tmp_path))
    with pytest.raises(UserError, match="gates must be a folder of gates or a Surrogate, got 3"):
        make_policy("kvzap:threshold=-4", model=model, gates=3)
