"""Each policy's rule on its own: what it admits, what it refuses, and what it says about a user's mistakes."""

import json
import sys
import types
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import stats
from kvjax.errors import UserError
from kvjax.inference.sampling import prefill
from kvjax.mesh import gather, use_mesh
from kvjax.policies import Policy, make_policy
from kvjax.policies.admission.head_pattern import choose_heads
from kvjax.policies.admission.pattern_folder import read_pattern
from kvjax.policies.admission.wgkv import GATE_FLOOR, WriteGateTraining, load_gates, save_gates
from kvjax.policies.interfaces import Admission, Eviction
from tests.policies.steps import shape_of, step, whole
from tests.tiny_models import tiny_gates, tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def gates(model):
    return tiny_gates(model)


def layer(tree, index):
    """One layer's part of a method, whole on the device, as the layer scan hands it over."""
    with use_mesh(tree):
        return gather(jax.tree.map(lambda leaf: leaf[index], tree), "fsdp", "tensor")


def kept(policy, at, index=0):
    admission = layer(policy.admission, index)
    with use_mesh(policy):
        _, priority, delay = admission.score(admission.init(shape_of(at)), at, *whole(at))
    assert delay == 0
    return np.asarray(priority >= admission.keep().threshold)


def test_full_keeps_everything():
    assert kept(make_policy("full"), step([[0, 5, 900]])).all()


def test_streaming_llm_keeps_the_sinks_only(model):
    policy = make_policy("streaming_llm", model=model, window=7, sink=3)
    np.testing.assert_array_equal(kept(policy, step([[0, 2, 3, 9]]))[0, 0], [True, True, False, False])
    assert not kept(make_policy("streaming_llm", model=model, window=7, sink=0), step([[0, 1]])).any()


def test_head_pattern_keeps_whole_heads_and_sinks(tmp_path, model):
    weights = np.array([[0.9, 0.1, 0.5, 0.0], [0.2, 1.4, 0.3, 0.6], [0.0, 0.0, 0.7, 0.1]])
    np.savetxt(tmp_path / "full_attention_heads.tsv", weights, delimiter="\t")
    (tmp_path / "config.json").write_text(json.dumps({"sink_size": 2, "recent_size": 5}))
    policy = make_policy("head_pattern", model=model, pattern=tmp_path)
    assert policy.window == 5
    np.testing.assert_array_equal(
        kept(policy, step([[1, 2]]), 1)[0], [[True, False], [True, True], [True, False], [True, True]]
    )
    third: Any = make_policy("head_pattern", model=model, pattern=tmp_path, ratio=1 / 3).admission
    assert np.asarray(third.pattern).sum() == 4
    np.testing.assert_array_equal(np.asarray(third.pattern)[2], [False, False, True, False])


def test_heads_of_equal_weight_are_taken_in_order():
    np.testing.assert_array_equal(choose_heads(np.zeros((2, 2)), 0.5), [[True, True], [False, False]])


def test_random_admits_its_rate_by_head_seed_and_layer(model):
    rates = np.linspace(0.1, 0.9, 12).reshape(3, 4)
    policy = make_policy("random", model=model, rates=rates, window=4, seed=5)
    positions = np.arange(20000)[None]
    found = np.stack([kept(policy, step(positions, layer=i), i)[0].mean(-1) for i in range(3)])
    assert np.abs(found - rates).max() < 4 * np.sqrt(0.25 / 20000)

    def draws(seed, layer):
        admission = make_policy("random", model=model, ratio=0.5, window=4, seed=seed)
        return kept(admission, step(positions, layer=layer), layer)[0]

    first = draws(0, 0)
    for one, other in ((first[0], draws(1, 0)[0]), (first[0], draws(0, 1)[0]), (first[0], first[1])):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.03


def test_random_of_rate_zero_and_one(model):
    for rate in (0.0, 1.0):
        policy = make_policy("random", model=model, ratio=rate, window=4)
        assert (kept(policy, step(np.arange(5000)[None])) == bool(rate)).all()


def test_write_gate_is_the_papers_formula(model, gates):
    at = step([[0, 1, 2]], layer=1)
    w = {name: np.asarray(getattr(gates, name)[...][1], np.float64) for name in
         ("norm_pre", "norm_post", "w1", "b1", "w2", "b2")}  # fmt: skip
    rms = lambda x, scale: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale  # noqa: E731
    from math import erf, exp

    want = np.zeros((1, 4, 3))
    for head in range(4):
        for token in range(3):
            k_pre, k = (np.asarray(x, np.float64)[0, head, token] for x in (at.k_pre, at.k))
            features = np.concatenate([rms(k_pre, w["norm_pre"]), rms(k, w["norm_post"])])
            hidden = features @ w["w1"][head] + w["b1"][head]
            hidden = np.array([x * 0.5 * (1 + erf(x / np.sqrt(2))) for x in hidden])
            want[0, head, token] = 1 / (1 + exp(-(hidden @ w["w2"][head] + w["b2"][head])))
    got = np.asarray(layer(gates, 1)(at.k_pre, at.k))
    np.testing.assert_allclose(got, want, atol=1e-5)
    policy = make_policy("wgkv", model=model, gates=gates, tau=float(np.median(want)), window=9)
    np.testing.assert_array_equal(kept(policy, at, 1), want >= np.median(want).astype(np.float32))


def test_write_gates_have_the_published_size():
    """Llama-3.1-8B 33,825,024 parameters, Qwen3-4B 14,275,872 (spec/wgkv §1)."""
    from flax import nnx

    from kvjax.policies.admission.wgkv import WriteGate

    with use_mesh():
        for shape, expand, want in ((32, 8, 128), 4.0, 33825024), ((36, 8, 128), 1.5, 14275872):
            made = jax.eval_shape(lambda s=shape, e=expand: WriteGate(*s, expand=e, rngs=nnx.Rngs(0)))
            assert sum(leaf.size for leaf in jax.tree.leaves(made)) == want


def test_sparsity_forms_on_the_worked_example(gates):
    """N 4, W 2, g [.5, 1, 0, .2]: lifetime .96875, paper .5275 and what the floor under the third gate adds (spec/wgkv
    §12.3)."""
    gate = jnp.asarray([[[0.5, 1.0, 0.0, 0.2]]])
    paper = 0.5275 + GATE_FLOOR * (2 - GATE_FLOOR) / 4
    forms: tuple[tuple[Literal["lifetime", "paper"], float], ...] = ("lifetime", 0.96875), ("paper", paper)
    for form, want in forms:
        method = WriteGateTraining(gates, jnp.float32(0.1), window=2, sparsity=form)
        found = method.figures(gate, step([[0, 1, 2, 3]]), None)
        np.testing.assert_allclose(found["sparsity"], want, atol=1e-6)
    np.testing.assert_allclose(found["kv_size"], 1.0)


def test_the_soft_gate_has_a_floor(gates):
    at = step([[0, 1]])
    closed = layer(gates, 0)
    closed.b2[...] = closed.b2[...] - 1e3
    method = WriteGateTraining(closed, jnp.float32(0.1), window=1)
    _, [mask] = method.masks(at)
    assert mask.weight is None
    assert mask.end is None
    np.testing.assert_allclose(mask.log_gate, np.log(GATE_FLOOR), rtol=1e-6)


def test_gates_survive_a_round_trip_and_refuse_another_model(tmp_path, model, gates):
    rate = np.full((3, 4), 0.25).tolist()
    save_gates(tmp_path, gates, {"tau": 0.2, "window": 6, "rate": rate})
    read, description = load_gates(tmp_path)
    assert description["window"] == 6
    jax.tree.map(np.testing.assert_array_equal, read, gates)
    policy: Any = make_policy("wgkv", model=model, gates=tmp_path)
    assert policy.window == 6
    np.testing.assert_allclose(policy.admission.tau, 0.2)
    np.testing.assert_allclose(policy.expected_entries(106, 1), 5 + 0.25 * 101)
    other = tiny_model(num_layers=2)
    with pytest.raises(UserError, match=r"\(3, 4, 8\), the model has \(2, 4, 8\)"):
        make_policy("wgkv", model=other, gates=tmp_path)
    (tmp_path / "gates.safetensors").write_bytes(b"junk")
    with pytest.raises(UserError, match="damaged"):
        make_policy("wgkv", model=model, gates=tmp_path)


def test_what_looks_at_no_tokens_reads_as_the_full_cache_does(model):
    """One compiled program for both; KeyDiff scores what is stored, SnapKV's queries must be seen."""
    full, keydiff, snapkv = (
        make_policy(name, model=model, **arguments).reading
        for name, arguments in (("full", {}), ("keydiff", {"ratio": 0.5}), ("snapkv", {"ratio": 0.5}))
    )
    assert jax.tree.structure(keydiff) == jax.tree.structure(full)
    assert jax.tree.structure(snapkv) != jax.tree.structure(full)


def test_expected_entries(model):
    assert make_policy("full").expected_entries(100, 1).item() == 100
    streaming = make_policy("streaming_llm", model=model, window=11, sink=4)
    np.testing.assert_array_equal(streaming.expected_entries(100, 1), np.full((3, 4), 14))
    np.testing.assert_array_equal(streaming.expected_entries(8, 1), np.full((3, 4), 8))


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("wgvk", {}, "unknown policy 'wgvk'; the nearest known: wgkv"),
        ("streaming_llm", {"window": 0}, "window must be a whole number of at least 1, got 0"),
        ("streaming_llm", {"window": 4, "sink": -1}, "sink must be a whole number of at least 0, got -1"),
        ("streaming_llm", {"window": 4, "sinks": 3}, "no argument 'sinks'"),
        ("random", {"window": 4}, "either ratio"),
        ("random", {"window": 4, "ratio": 1.5}, "ratio must be a finite number, at least 0 and at most 1, got 1.5"),
        ("random", {"window": 4, "rates": np.zeros((2, 4))}, "made for 2 layers × 4 kv heads, the model has 3 × 4"),
        ("wgkv", {}, "wgkv needs gates"),
        ("wgkv", {"gates": "nowhere"}, "nowhere holds no gates"),
        ("head_pattern", {"pattern": "nowhere"}, "nowhere is no head pattern"),
        ("head_pattern", {"pattern": np.zeros((3, 4))}, "needs sink and window"),
        ("head_pattern", {"pattern": np.zeros((3, 5)), "sink": 1, "window": 3}, "made for 3 layers × 5 kv heads"),
        ("head_pattern", {"pattern": np.zeros((3, 4)), "sink": 1, "window": 3, "ratio": 2.0}, "ratio must be a finite"),
    ],
)  # fmt: skip
def test_mistakes_are_named_in_one_line(model, name, arguments, says):
    with pytest.raises(UserError, match=says) as caught:
        make_policy(name, model=model, **arguments)
    assert "\n" not in str(caught.value)


def test_a_pattern_file_with_words_in_it(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "full_attention_heads.tsv").write_text("0.1\tyes\n")
    with pytest.raises(UserError, match="table of numbers"):
        read_pattern(tmp_path)
    (tmp_path / "full_attention_heads.tsv").write_text("0.1\t0.2\n")
    with pytest.raises(UserError, match="sink_size"):
        read_pattern(tmp_path)


@pytest.mark.parametrize(("role", "missing"), [(Admission, "keep, score"), (Eviction, "score")])
def test_a_method_that_lacks_a_function_is_refused_when_it_is_made(role, missing):
    with pytest.raises(TypeError, match=missing.replace(", ", ".*")):
        type("Half", (role,), {})()


def test_the_example_of_contributing_is_a_policy(model, monkeypatch):
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    source = text.split("```python")[1].split("```")[0]
    written: Any = types.ModuleType("key_norm")
    monkeypatch.setitem(sys.modules, "key_norm", written)
    exec(source, written.__dict__)
    for limit, kept in ((0.0, 3), (1e9, 40)):
        policy = Policy(written.KeyNorm(limit=limit), window=4)
        entries = stats(prefill(model, [np.arange(40)], policy=policy)).entries
        assert (entries == kept).all()


def test_rates_are_not_taken_for_a_lower_tau(tmp_path):
    model = tiny_model()
    rates = {"rate": np.full((3, 4), 0.25).tolist(), "peak_rate": np.full((3, 4), 0.5).tolist()}
    save_gates(tmp_path, tiny_gates(model), {"tau": 0.2, "window": 6} | rates)
    for tau, rate in ((0.1, 1.0), (0.2, 0.5), (0.3, 0.5)):
        policy = make_policy("wgkv", model=model, gates=tmp_path, tau=tau)
        np.testing.assert_allclose(policy.admission.rate, rate)
