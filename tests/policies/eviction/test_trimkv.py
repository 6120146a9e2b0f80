"""Test TrimKV and DBTrimKV against their formulas in float64, and the authors' files."""

import dataclasses
import json
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import inference
from kvjax.errors import UserError
from kvjax.evaluate.gates import describe_gates
from kvjax.inference.capture import captured_layers
from kvjax.policies import Policy, make_policy
from kvjax.policies.eviction.trimkv import FORMS, KEY_VALUE_FORMS, Sizes, TrimKV, load_gates
from kvjax.policies.views import Readout
from kvjax.sampling_params import SamplingParams
from kvjax.struct import changed
from tests.checkpoints.torch_files import View, write_torch
from tests.policies import published
from tests.policies.captured import LENGTHS, PAGE, entries, scored
from tests.policies.eviction.kept_sets import RATIO, assert_published
from tests.policies.steps import step, stored
from tests.tiny_models import tiny_model, tiny_retention_gates

pytestmark = pytest.mark.slow

UNREAD = object.__new__(Readout)
"""A readout that nothing is read from."""
PREFIX = "model.layers.{}.self_attn.retention_gate."


def test_a_worked_example():
    """After 6 tokens, an entry with β = 0.9 at position 0 scores below one with β = 0.8 at position 5, since
    0.9⁷ = 0.478 < 0.8² = 0.64. After 20 tokens it scores above it, since 0.9²¹ = 0.109 > 0.8¹⁶ = 0.028."""
    method = TrimKV(tiny_retention_gates(tiny_model()))
    metadata = {"log_beta": jnp.log(jnp.array([[[0.9, 0.8]]])), "position": jnp.array([[[0, 5]]])}
    for seen, expected in ((6, (0.478, 0.64)), (20, (0.109, 0.028))):
        two = dataclasses.replace(stored(np.zeros((1, 2, 2)), [1.0], seen), metadata=metadata)
        np.testing.assert_allclose(np.exp(method.score((), two)[0, 0]), expected, atol=1e-3)


def silu(x):
    return x / (1 + np.exp(-x))


def log_beta(arrays, form, x):
    """Return log β [k t] of a layer's tokens, from the arrays of the authors' file and the input [t d]."""
    w = {name: np.asarray(array, np.float64) for name, array in arrays.items()}
    if form == "rg3":
        hidden = silu(x @ w["gate_proj.weight"].T) * (x @ w["up_proj.weight"].T)
        logit = hidden @ w["down_proj.weight"].T
    else:
        hidden = silu(x @ w["linear1.weight"].T + w["linear1.bias"])
        if form == "rg10":
            hidden = silu(hidden @ w["linear2.weight"].T + w["linear2.bias"])
        logit = hidden @ w["linear3.weight" if form == "rg10" else "linear2.weight"].T
    return -np.logaddexp(0, -(logit + w["bias"])).T


def layer_arrays(form, *, layers=3, tied=False, seed=0):
    """Return each layer's arrays by the authors' names, for 4 kv heads of 8 and a width of 32."""
    random = np.random.default_rng(seed)
    sizes = Sizes(form, layers, 4, 64 if form in KEY_VALUE_FORMS else 32, 6)
    shapes = {FORMS[form][name]: shape for name, shape in sizes.shapes.items()}
    found = [
        {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        for _ in range(layers)
    ]
    shared = ("linear3.weight", "bias") if tied else ()
    return [layer | {name: found[0][name] for name in shared} for layer in found]


def write_published(folder, form, layers, **config):
    """Write the authors' two files. An array that layers share is one storage of the file."""
    content, views = {}, {}
    for index, layer in enumerate(layers):
        for name, array in layer.items():
            views[id(array)] = views.get(id(array)) or (
                View(array) if isinstance(array, np.ndarray) else array
            )
            content[PREFIX.format(index) + name] = views[id(array)]
    file = folder / "trimkv_weights.pth"
    write_torch(file, content)
    description = {
        "retention_gate": form,
        "hidden_act": "silu",
        "memory_size": 512.0,
        "base_model": "a/model",
    }
    (folder / "config.json").write_text(json.dumps(description | config))
    return file


@pytest.mark.parametrize("form", FORMS)
def test_each_form_matches_the_authors_formula(tmp_path, form):
    """The inputs are hidden states, or each kv head's key after RoPE and value, head by head."""
    layers = layer_arrays(form)
    file = write_published(tmp_path, form, layers)
    gates = load_gates(tmp_path)
    assert (gates.sizes, describe_gates(file)) == (load_gates(file).sizes, {"method": "trimkv"})
    one = step([[0, 1, 2, 3, 4]])
    kv = np.concatenate([np.asarray(one.k[0]), np.asarray(one.v[0])], -1)
    x = kv.transpose(1, 0, 2).reshape(5, -1) if form in KEY_VALUE_FORMS else np.asarray(one.hidden[0])
    for index in (0, 2):
        method = changed(TrimKV(gates), gates=sliced(gates, index))
        found = method.numbers((), one, UNREAD)["log_beta"]
        np.testing.assert_allclose(
            found[0], log_beta(layers[index], form, x.astype(np.float64)), rtol=2e-5, atol=1e-6
        )


def sliced(gates, layer):
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[layer]), gates)


def test_a_device_computes_its_own_heads():
    """Gates of keys and values need all heads, and raise an error otherwise."""
    model, one = tiny_model(), step([[0, 1, 2]])
    halves = [
        dataclasses.replace(one, k=one.k[:, part], v=one.v[:, part], head=one.head[part])
        for part in (slice(0, 2), slice(2, 4))
    ]
    gates = tiny_retention_gates(model)
    method = changed(TrimKV(gates), gates=sliced(gates, 1))
    whole, *parts = (method.numbers((), x, UNREAD)["log_beta"] for x in (one, *halves))
    np.testing.assert_allclose(whole, np.concatenate(parts, 1), rtol=1e-6)
    gates = tiny_retention_gates(model, "rg2")
    method = changed(TrimKV(gates), gates=sliced(gates, 1))
    with pytest.raises(UserError, match="gates of the form rg2 look at all kv heads of a token"):
        method.numbers((), halves[0], UNREAD)


def with_hidden(model, prompts):
    """Return, by sequence and layer, the keys and the hidden states of a prompt, and the layer."""
    return [
        [
            SimpleNamespace(k=x["k"][0], hidden=np.asarray(x["hidden"][0], np.float64), layer=layer)
            for layer, x in enumerate(captured_layers(model, Policy(), None, [prompt], ("k", "hidden")))
        ]
        for prompt in prompts
    ]


def of_layer(gates, layer):
    """Return a layer's arrays by the authors' names."""
    names = FORMS[gates.sizes.form]
    return {names[name]: np.asarray(getattr(gates, name)[...])[layer] for name in names}


def expected_scores(gates, c):
    """Return the scores of a prompt's tokens [k t]."""
    tokens = len(c.hidden)
    return (tokens + 1 - np.arange(tokens)) * log_beta(of_layer(gates, c.layer), gates.sizes.form, c.hidden)


def test_scores_and_kept_sets_are_the_published_ones(model, prompts):
    gates = tiny_retention_gates(model)
    policy = make_policy({"trimkv": {"ratio": RATIO}}, model=model, gates=gates)
    trigger = policy.schedule.trigger
    assert (trigger.when, trigger.every, policy.eviction.shares.over) == ("every", 128, "head")
    assert_published(
        policy, lambda c, kept: expected_scores(gates, c), model, prompts, with_hidden(model, prompts)
    )


def test_all_layers_and_heads_of_dbtrimkv_share_a_budget(model, prompts):
    """As many entries stay as with a budget for each head, and they are the best of all heads."""
    gates = tiny_retention_gates(model, "rg10")
    policy = make_policy({"trimkv": {"ratio": RATIO}}, model=model, gates=gates)
    cache = inference.prefill(model, prompts, policy=policy, page_size=PAGE)
    scores = scored(model, policy, prompts)
    for b, layers in enumerate(with_hidden(model, prompts)):
        want = np.stack([expected_scores(gates, c) for c in layers])
        np.testing.assert_allclose(scores[:, b, :, -LENGTHS[b] :], want, atol=1e-5)
        total = int(12 * (RATIO * LENGTHS[b]))
        stays = published.best(want.reshape(-1), total).reshape(want.shape)
        assert len({*stays.sum(-1).ravel().tolist()}) > 3
        for layer, c in enumerate(layers):
            for head, mask in enumerate(stays[layer]):
                np.testing.assert_allclose(entries(cache, layer, b, head), c.k[head][mask], atol=1e-4)


@pytest.mark.parametrize("when", ["every", "position"])
def test_scores_decay_with_age_in_answers(model, prompts, when):
    """The first layer's hidden states depend on nothing but the tokens. Each entry keeps its β and its position when
    it moves, so that after each round the best of all those left and the new ones stay."""
    gates, prompt = tiny_retention_gates(model), prompts[0]
    policy = make_policy(f"trimkv:entries=20,when={when},every=8", model=model, gates=gates)
    sampling = SamplingParams(max_new_tokens=20, ignore_eos=True)
    blocks = list(inference.stream(model, [prompt], sampling, policy=policy, block=4, page_size=PAGE))
    cache = blocks[-1].cache
    seen, answer = int(cache.seen[0]), np.concatenate([block.tokens[0] for block in blocks])
    ((c, *_),) = with_hidden(model, [np.concatenate([prompt, answer])[:seen]])
    decay, place = log_beta(of_layer(gates, 0), "rg", c.hidden), np.arange(seen)
    stays, before = np.zeros((4, seen), bool), 0
    for tokens in (60, 68, 76) if when == "every" else (60, 64, 72):
        stays[:, before:tokens], before = True, tokens
        score = (tokens + 1 - place) * decay
        stays = published.best(np.where(stays, score, -np.inf), 20)
    stays[:, before:] = True
    assert (stays[:, :60] != published.best(decay[:, :60], 20)).any()
    for head, mask in enumerate(stays):
        np.testing.assert_allclose(entries(cache, 0, 0, head), c.k[head][mask], atol=1e-4)


def test_layers_may_share_an_array_of_the_file(tmp_path):
    """DBTrimKV's last layer is tied. Its file holds it once, and it is read for each layer."""
    layers = layer_arrays("rg10", tied=True)
    gates = load_gates(write_published(tmp_path, "rg10", layers, global_capacity=True))
    for layer in layers:
        assert layer["linear3.weight"] is layers[0]["linear3.weight"]
    w_out = np.asarray(gates.w_out[...])
    np.testing.assert_array_equal(w_out, np.stack([layers[0]["linear3.weight"]] * 3))
    np.testing.assert_array_equal(
        np.asarray(gates.w_mid[...]), np.stack([x["linear2.weight"] for x in layers])
    )


def test_a_file_that_torch_saved_is_read(tmp_path):
    torch = pytest.importorskip("torch")
    layers = layer_arrays("rg10")
    shared = torch.nn.Parameter(torch.tensor(layers[0]["linear3.weight"]))
    content = {
        PREFIX.format(index) + name: shared.detach() if name == "linear3.weight" else torch.tensor(array)
        for index, layer in enumerate(layers)
        for name, array in layer.items()
    }
    write_published(tmp_path, "rg10", layers)
    torch.save({name: x.bfloat16() for name, x in content.items()}, tmp_path / "trimkv_weights.pth")
    gates = load_gates(tmp_path)
    want = np.stack(
        [content[PREFIX.format(index) + "linear1.weight"].bfloat16().float() for index in range(3)]
    )
    np.testing.assert_array_equal(np.asarray(gates.w_in[...]), want)


INVALID_FILES = {
    "no gates": ({"a": np.zeros(3, np.float32)}, {}, "pth: these are no gates of TrimKV, which have no 'a'"),
    "nothing": ({}, {}, "pth: these are no gates of the form rg: layer 0 has no linear1.weight and linear2.weight"),
    "another form": (None, {"retention_gate": "rg10"}, "rg10: layer 0 has no linear1.weight and linear3.weight"),
    "no form": (None, {"retention_gate": "rg4"}, "config.json: retention_gate is one of rg, rg2, .*, got 'rg4'"),
    "another activation": (None, {"hidden_act": "gelu"}, "config.json: hidden_act should be 'silu', got 'gelu'"),
    "an array less": ({"linear1.bias": None}, {}, r"layer 1: linear1.bias should have shape .6,., found nothing"),
    "an array more": ({"x": np.zeros(3, np.float32)}, {}, "layer 1 has 'x', which such gates do not have"),
}  # fmt: skip


@pytest.mark.parametrize("case", INVALID_FILES)
def test_invalid_files_are_refused_in_one_line(tmp_path, case):
    changes, config, message = INVALID_FILES[case]
    layers = layer_arrays("rg")
    file = write_published(tmp_path, "rg", layers, **config)
    if case in ("no gates", "nothing"):
        write_torch(file, changes)
    elif changes:
        layers[1] = {name: x for name, x in (layers[1] | changes).items() if x is not None}
        write_published(tmp_path, "rg", layers)
    with pytest.raises(UserError, match=message):
        load_gates(tmp_path)


def test_gates_of_another_model_are_refused(tmp_path):
    file = write_published(tmp_path, "rg", layer_arrays("rg"))
    with pytest.raises(UserError, match=re.escape("= (3, 4, 32), the model has (2, 4, 32)")):
        make_policy("trimkv:ratio=0.5", model=tiny_model(num_layers=2), gates=file)
    with pytest.raises(
        UserError, match="gates must be the authors' folder or file, or a RetentionGate, got 3"
    ):
        make_policy("trimkv:ratio=0.5", gates=3)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match=r"config.json: cannot be read"):
        load_gates(file)
