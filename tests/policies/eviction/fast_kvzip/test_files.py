"""Test gates in files: our layout and the authors' are read; damaged files and those for another model are refused."""

import json
import math
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from kvjax.cache import stats
from kvjax.errors import UserError
from kvjax.inference import prefill
from kvjax.mesh import HEADS, make_mesh, use_mesh
from kvjax.policies import make_policy
from kvjax.policies.eviction.fast_kvzip import FORMS, SinkGate, load_gates, save_gates
from kvjax.policies.eviction.fast_kvzip.files import Sizes, gate_sizes
from tests.checkpoints.torch_files import Global, Numpy, write_torch
from tests.policies.eviction.fast_kvzip.published import layer_arrays, write_published
from tests.tiny_models import sliding_model, tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def gates_for(model, *, width=None, **options):
    config = model.config
    sizes = config.num_layers, config.num_kv_heads, config.num_heads // config.num_kv_heads
    with use_mesh():
        return jax.jit(lambda: SinkGate(*sizes, width or config.width, **options, rngs=nnx.Rngs(2)))()


@pytest.mark.parametrize("form", FORMS)
def test_gates_survive_a_round_trip(tmp_path, model, form):
    gates = gates_for(model, dim=4, sinks=3, form=form)
    save_gates(tmp_path, gates, {"window": 64})
    read, description = load_gates(tmp_path)
    assert description["window"] == 64
    assert description["method"] == "fast_kvzip"
    assert gate_sizes(tmp_path) == Sizes.of(gates)
    assert jax.tree.structure(read) == jax.tree.structure(gates)
    jax.tree.map(np.testing.assert_array_equal, read, gates)


def test_gates_are_split_by_head(tmp_path, model):
    save_gates(tmp_path, gates_for(model), {})
    with jax.set_mesh(make_mesh(fsdp=2, tensor=4)):
        read, _ = load_gates(tmp_path)
    for name in ("w_q", "k_base", "b"):
        assert getattr(read, name)[...].sharding.spec[1] == HEADS


def test_gates_of_another_model_are_refused(tmp_path, model):
    save_gates(tmp_path, gates_for(model), {})
    config = model.config
    head = (config.num_kv_heads, config.num_heads // config.num_kv_heads, config.width)
    with pytest.raises(
        UserError, match=re.escape(f"= {(config.num_layers, *head)}, the model has {(2, *head)}")
    ):
        make_policy("fast_kvzip:ratio=0.5", model=tiny_model(num_layers=2), gates=tmp_path)
    save_gates(tmp_path, gates_for(model, width=config.head_dim), {"inputs": "k"})
    assert load_gates(tmp_path)[1]["inputs"] == "k"
    save_gates(tmp_path, gates_for(model, width=config.head_dim), {})
    with pytest.raises(UserError, match=rf"{config.head_dim}\), the model has"):
        make_policy("fast_kvzip:ratio=0.5", model=model, gates=tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"form": "gelu"},
        {"form": ["sink"]},
        {"inputs": "v"},
        {"sinks": 0},
        {"dim": "wide"},
        {"group": None},
        {"layers": math.nan},
        {"width": 10**30},
        {"kv_heads": -1},
    ],
)
def test_an_invalid_description_is_refused_in_one_line(tmp_path, model, wrong):
    save_gates(tmp_path, gates_for(model), {})
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | wrong))
    with pytest.raises(UserError, match="no Fast KVzip gates, or the files are damaged"):
        load_gates(tmp_path)


def test_gates_that_are_not_finite_are_named(tmp_path, model):
    gates = gates_for(model)
    gates.k_base[...] = gates.k_base[...] * np.nan
    save_gates(tmp_path, gates, {})
    with pytest.raises(UserError, match=r"k_base has numbers that are not finite$"):
        load_gates(tmp_path)


def test_an_array_of_another_shape_is_named(tmp_path, model):
    save_gates(tmp_path, gates_for(model, sinks=4), {"sinks": 5})
    with pytest.raises(
        UserError, match=r"safetensors: k_base should have shape \(3, 4, 5, 16\), found \(3, 4, 4, 16\)"
    ):
        load_gates(tmp_path)


@pytest.fixture
def published(tmp_path):
    """Return a file in the authors' layout: 3 layers of 4 kv heads with 2 query heads each, for a width of 32."""
    return write_published(tmp_path / "q2_dim16_sink16.pt", layers=3, kv_heads=4, group=2, width=32)


def test_the_authors_file_is_read(tmp_path, published):
    file, layers = published
    gates, description = load_gates(file)
    assert gate_sizes(file) == Sizes(3, 4, 2, 32, 16, 16, "sink", "hidden") == Sizes.of(gates)
    assert description["sinks"] == 16
    x = jnp.asarray(np.random.default_rng(1).standard_normal((1, 5, 32)), jnp.float32)
    for index in (0, 2):
        gate = jax.tree.map(lambda leaf, index=index: jnp.asarray(np.asarray(leaf)[index]), gates)
        found = jax.jit(lambda gate: gate(x))(gate)
        np.testing.assert_allclose(found, published_scores(layers[index], np.asarray(x)), atol=2e-6)
    save_gates(tmp_path / "gates", gates, description)
    jax.tree.map(np.testing.assert_array_equal, load_gates(tmp_path / "gates")[0], gates)


def published_scores(layer, x):
    """Return a layer's scores as the authors' code computes them (and kvpress's FastKVzipGate), in float64; x [1 t
    d]."""
    w = {name: np.asarray(array, np.float64) for name, array in layer.items()}
    rms = lambda x, scale: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale  # noqa: E731
    h = np.asarray(x[0], np.float64)
    heads, _, _, dim = w["k_base"].shape
    queries = rms(
        (h @ w["q_proj.weight"].T + w["q_proj.bias"]).reshape(len(h), heads, -1, dim), w["q_norm.weight"]
    )
    keys = rms((h @ w["k_proj.weight"].T).reshape(len(h), heads, 1, dim), w["k_norm.weight"])
    queries, keys = queries.transpose(1, 0, 3, 2), keys.transpose(1, 0, 2, 3)
    logit = keys @ queries / np.sqrt(dim) + w["b"][:, :, None]
    base = w["k_base"] @ queries / np.sqrt(dim)
    return (1 / (1 + np.exp(base - logit).sum(2, keepdims=True))).mean(-1)[None, ..., 0]


def test_the_authors_file_is_for_its_model(published, model):
    file, _ = published
    make_policy("fast_kvzip:ratio=0.5", model=model, gates=file)
    with pytest.raises(UserError, match=r"= \(3, 4, 2, 32\), the model has \(2, 4, 2, 32\)"):
        make_policy("fast_kvzip:ratio=0.5", model=tiny_model(num_layers=2), gates=file)


@pytest.mark.slow
def test_the_authors_gates_of_gemma_3_are_for_its_layers_with_full_attention(published):
    model = sliding_model()
    assert (model.config.num_layers, model.config.num_full_layers) == (7, 3)
    policy = make_policy("fast_kvzip:ratio=0.5", model=model, gates=published[0])
    cache = prefill(model, [np.arange(40)], policy=policy)
    assert stats(cache).entries.shape == (3, 1, 4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("q2_dim16_sink8", "sink8, its arrays are of sink16"),
        ("q4_dim16", "q4"),
        ("q2_dim8_sink16", "dim8, its arrays are of dim16"),
    ],
)
def test_file_names_with_other_sizes_are_refused(published, name, message):
    file = published[0].rename(published[0].with_name(f"{name}.pt"))
    with pytest.raises(UserError, match=f"its name says {message}"):
        load_gates(file)


def test_file_names_without_sizes_are_accepted(published):
    load_gates(published[0].rename(published[0].with_name("sinking-dim8.pt")))


def changed(**arrays):
    """Return two layers' arrays, with the given ones changed in the second."""
    first, second = layer_arrays(kv_heads=4, group=2, width=32), layer_arrays(kv_heads=4, group=2, width=32)
    second |= {name.replace("__", "."): array for name, array in arrays.items()}
    return [first, {name: array for name, array in second.items() if array is not None}]


INVALID_FILES = {
    "no layers": ([], "a list of layers"),
    "no list": ({"0": layer_arrays(kv_heads=4, group=2, width=32)}, "a list of layers"),
    "no gates": ([{"weight": np.zeros(3, np.float32)}], "expected q_proj.weight, k_base and b"),
    "no sinks": (
        [layer_arrays(kv_heads=4, group=2, width=32, sinks=0)],
        "expected q_proj.weight, k_base and b",
    ),
    "no b": (changed(b=None), r"layer 1: b should have shape \(4, 1, 2\), found nothing"),
    "a number for b": (changed(b=1.0), r"layer 1: b should have shape \(4, 1, 2\), found float"),
    "a losses' array for b": (changed(b=Numpy(np.zeros((4, 1, 2)))), "found Unread"),
    "another width": (
        changed(k_proj__weight=np.zeros((64, 16), np.float32)),
        r"\(64, 32\), found \(64, 16\)",
    ),
    "more": (
        changed(v_proj__weight=np.zeros((64, 32), np.float32)),
        "layer 1 has 'v_proj.weight', which such gates do not have",
    ),
    "code": (changed(b=Global("posix", "system")("true")), "asks for posix.system, which gates do not need"),
}


@pytest.mark.parametrize("case", INVALID_FILES)
def test_invalid_files_are_refused_in_one_line(tmp_path, case):
    module, message = INVALID_FILES[case]
    write_torch(tmp_path / "x.pt", {"module": module})
    with pytest.raises(UserError, match=message) as caught:
        load_gates(tmp_path / "x.pt")
    assert str(tmp_path / "x.pt") in str(caught.value)


def test_scores_match_kvpress(tmp_path):
    """The scores agree for kvpress's gates with random weights, saved by torch and read by us."""
    torch = pytest.importorskip("torch")
    FastKVzipGate = pytest.importorskip("kvpress.presses.fastkvzip_press").FastKVzipGate
    torch.manual_seed(0)
    twins = [FastKVzipGate(index, 32, 4, 2, torch.float32) for index in range(3)]
    for twin in twins:
        for parameter in twin.parameters():
            parameter.data += 0.5 * torch.randn_like(parameter)
    states = [twin.state_dict() for twin in twins]
    file = tmp_path / "q2_dim16_sink16.pt"
    torch.save({"module": states, "loss": np.ones(2), "acc": np.ones(2, np.float32)}, file)
    gates, _ = load_gates(file)
    x = torch.randn(1, 7, 32)
    for index, twin in enumerate(twins):
        found = jax.tree.map(lambda leaf, index=index: leaf[index], gates)(jnp.asarray(x.numpy()))
        np.testing.assert_allclose(found, twin(x).detach().numpy(), atol=1e-5)
        np.testing.assert_allclose(found, published_scores(states[index], x.numpy()), atol=1e-5)


def test_sixteen_bit_files_are_read_exactly(tmp_path):
    file, layers = write_published(
        tmp_path / "x.pt", layers=2, kv_heads=2, group=3, width=8, dtype=ml_dtypes.bfloat16
    )
    gates, _ = load_gates(file)
    assert gates.w_q[...].dtype == jnp.float32
    np.testing.assert_array_equal(
        gates.w_k[...][1].reshape(32, 8), layers[1]["k_proj.weight"].astype(np.float32)
    )
