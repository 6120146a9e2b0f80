"""Test gates in files: our layout and the authors' are read; damaged files and those for another model are refused."""

import math
from math import erf
from typing import Any

import jax
import numpy as np
import pytest

from kvjax.checkpoints.folder import save_exported
from kvjax.errors import UserError
from kvjax.mesh import HEADS, make_mesh
from kvjax.policies import make_policy
from kvjax.policies.admission.wgkv import load_gates, save_gates
from kvjax.policies.admission.wgkv.files import Sizes, gate_sizes
from tests.checkpoints.torch_files import Global, write_torch
from tests.policies.admission.admitted import layer
from tests.policies.admission.wgkv.published import published_arrays
from tests.policies.steps import step
from tests.tiny_models import tiny_model


def test_gates_survive_a_round_trip_and_refuse_another_model(tmp_path, model, gates):
    rate = np.full((3, 4), 0.25).tolist()
    save_gates(tmp_path, gates, {"tau": 0.2, "window": 6, "rate": rate})
    read, description = load_gates(tmp_path)
    assert description["window"] == 6
    assert gate_sizes(tmp_path) == Sizes(3, 4, 8, 4.0)
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


@pytest.mark.parametrize(
    "wrong",
    [
        *({"expand": value} for value in (0, -1, math.nan, math.inf, 10**400, 1e-9, "4", None, [4])),
        *({"head_dim": value} for value in (0, -1, math.nan, math.inf, 2**70, True)),
    ],
)
def test_an_invalid_description_is_refused(tmp_path, wrong):
    description = Sizes(3, 4, 8, 4.0)._asdict() | wrong
    save_exported(tmp_path, {}, description)
    with pytest.raises(UserError, match="no WG-KV gates, or the files are damaged"):
        load_gates(tmp_path)


def test_a_description_that_is_no_object_is_refused(tmp_path):
    save_exported(tmp_path, {}, {})
    for text in ("[" * 100_000, "[1]", "1" * 5000, "null"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match="this describes no gates, or the file is damaged"):
            gate_sizes(tmp_path)


def test_an_array_with_numbers_that_are_not_finite_is_named(published):
    file, arrays = published
    name = "model.layers.1.self_attn.g_predictors.conv1.bias"
    for value in (np.inf, np.nan):
        write_torch(file, arrays | {name: np.full_like(arrays[name], value)}, parameters=True)
        with pytest.raises(UserError, match=r"layer 1: conv1\.bias has numbers that are not finite$"):
            load_gates(file)


def test_a_missing_folder_is_named_in_one_line(model):
    with pytest.raises(UserError, match="nowhere holds no gates"):
        make_policy("wgkv", model=model, gates="nowhere")


@pytest.fixture
def published(tmp_path):
    """Return a file in the authors' layout for the tiny model, and its arrays."""
    arrays = published_arrays(layers=3, kv_heads=4, head_dim=8, width=12)
    write_torch(tmp_path / "tiny-0.08.pt", arrays, parameters=True)
    return tmp_path / "tiny-0.08.pt", arrays


def test_the_authors_file_is_read(model, published):
    """The file's convolutions, whose groups are kv heads, are computed output by output in float64. Its window is 256
    and its τ 0.1."""
    file, arrays = published
    gates, description = load_gates(file, model)
    assert gate_sizes(file) == Sizes(3, 4, 8, 1.5)
    assert (description["window"], description["tau"], description["expand"]) == (256, 0.1, 1.5)
    at = step([[0, 1, 2]], layer=1)
    w = {name.removeprefix("model.layers.1.self_attn.g_predictors."): np.asarray(array, np.float64)
         for name, array in arrays.items() if ".1.self_attn" in name}  # fmt: skip
    rms = lambda x, scale: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale  # noqa: E731
    k_pre, k = (np.asarray(x, np.float64) for x in (at.k_pre, at.k))
    both = np.concatenate([rms(k_pre, w["pre_key_norm.weight"]), rms(k, w["post_key_norm.weight"])], -1)
    expected = np.zeros((1, 4, 3))
    for head, token in np.ndindex(4, 3):
        outputs = range(12 * head, 12 * (head + 1))
        hidden = [
            w["conv1.weight"][out, :, 0] @ both[0, head, token] + w["conv1.bias"][out] for out in outputs
        ]
        hidden = [x * 0.5 * (1 + erf(x / np.sqrt(2))) for x in hidden]
        logit = w["conv2.weight"][head, :, 0] @ hidden + w["conv2.bias"][head]
        expected[0, head, token] = 1 / (1 + np.exp(-logit))
    found = jax.jit(lambda gate: gate(at.k_pre, at.k))(layer(gates, 1))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_policy_takes_the_authors_file(model, published):
    policy: Any = make_policy("wgkv", model=model, gates=published[0])
    assert policy.window == 256
    np.testing.assert_allclose(policy.admission.tau, 0.1)
    with pytest.raises(UserError, match=r"\(3, 4, 8\), the model has \(2, 4, 8\)"):
        make_policy("wgkv", model=tiny_model(num_layers=2), gates=published[0])
    with pytest.raises(UserError, match=r"nowhere.pt: cannot be read \(No such file"):
        make_policy("wgkv", model=model, gates="nowhere.pt")


def test_the_authors_file_is_split_over_the_mesh(published):
    with jax.set_mesh(make_mesh(fsdp=2, tensor=4)):
        gates, _ = load_gates(published[0])
    assert gates.w1[...].sharding.spec == jax.P(None, HEADS, None, "fsdp")
    jax.tree.map(
        np.testing.assert_array_equal, jax.device_get(gates), jax.device_get(load_gates(published[0])[0])
    )


PREFIX = "model.layers.1.self_attn.g_predictors."
INVALID_FILES = {
    "no dictionary": ([1], "are no WG-KV gates: layer 0 has no"),
    "a model": ({"model.embed_tokens.weight": np.zeros(3, np.float32)}, "which have no 'model.embed_tokens.weight'"),
    "no array": ({PREFIX + "conv2.bias": None}, r"layer 1: conv2.bias should have shape \(4,\), found nothing"),
    "another": ({PREFIX + "conv1.bias": np.zeros(4, np.float32)}, r"conv1.bias should have shape \(48,\), found"),
    "more": ({PREFIX + "conv3.bias": np.zeros(4, np.float32)}, "layer 1 has 'conv3.bias', which such gates"),
    "a layer of nothing": ({PREFIX.replace("1", "4") + "conv2.bias": np.zeros(4, np.float32)}, "layer 3: pre_key_norm"),
    "code": ({PREFIX + "conv2.bias": Global("posix", "system")("true")}, "asks for posix.system, which gates do"),
}  # fmt: skip


@pytest.mark.parametrize("case", INVALID_FILES)
def test_invalid_files_are_refused_in_one_line(tmp_path, case):
    other, message = INVALID_FILES[case]
    if isinstance(other, dict):
        content = published_arrays(layers=3, kv_heads=4, head_dim=8, width=12) | other
        other = {name: array for name, array in content.items() if array is not None}
    write_torch(tmp_path / "x.pt", other)
    with pytest.raises(UserError, match=message) as caught:
        load_gates(tmp_path / "x.pt")
    assert str(tmp_path / "x.pt") in str(caught.value)


def test_gates_match_torch_convolutions(tmp_path):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    convolutions = torch.nn.Conv1d(64, 48, 1, groups=4), torch.nn.Conv1d(48, 4, 1, groups=4)
    saved = {f"model.layers.0.self_attn.g_predictors.{name}_key_norm.weight": torch.nn.Parameter(torch.ones(8))
             for name in ("pre", "post")}  # fmt: skip
    for number, convolution in enumerate(convolutions, 1):
        for name, parameter in convolution.named_parameters():
            saved[f"model.layers.0.self_attn.g_predictors.conv{number}.{name}"] = parameter
    torch.save(saved, tmp_path / "x.pt")
    gates, _ = load_gates(tmp_path / "x.pt")
    at = step([[0, 1, 2]])
    pre, post = (torch.tensor(np.asarray(x)) for x in (at.k_pre, at.k))
    norm = torch.nn.RMSNorm(8, eps=1e-6)
    both = torch.cat([norm(pre), norm(post)], -1)[0].transpose(1, 2).reshape(1, 64, 3)
    expected = torch.sigmoid(convolutions[1](torch.nn.functional.gelu(convolutions[0](both))))
    np.testing.assert_allclose(layer(gates, 0)(at.k_pre, at.k), expected.detach().numpy(), atol=1e-5)
