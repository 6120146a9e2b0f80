"""Tests of loading Hugging Face folders: sharding, the rows that are read, host memory, and errors."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from kvjax.errors import UserError
from kvjax.mesh import make_mesh, use_mesh
from kvjax.models import load_model, save_model
from kvjax.models.tensor_files import TensorInFile
from tests.models.cases import CASES, GEMMA3, LLAMA, hf_shapes, weights, write_folder
from tests.models.files import WIDE, assert_equal
from tests.models.refusals import error

ROOT = Path(__file__).parents[2]

CASE = CASES["qwen3_biases"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("qwen3"), CASE)


@pytest.fixture(scope="module")
def whole(folder):
    return load_model(folder)


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("wide"), WIDE)


MESHES = [
    {"fsdp": 8},
    {"fsdp": 4, "tensor": 2},
    {"tensor": 8},
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"data": 8},
]


def test_tensors_are_loaded_into_their_arrays(whole):
    w = weights(CASE)
    layer = {name.removeprefix("model.layers.2."): x for name, x in w.items()}
    d, n, h = 48, 6, 16
    own = {
        name.removeprefix("layers.").removesuffix(".value"): x.value
        for name, x in whole.unfused_arrays().items()
    }
    q = np.asarray(own["q"][2])
    np.testing.assert_array_equal(q, layer["self_attn.q_proj.weight"].T.reshape(d, n, h))
    o = np.asarray(own["o"][2])
    np.testing.assert_array_equal(o, layer["self_attn.o_proj.weight"].T.reshape(n, h, d))
    np.testing.assert_array_equal(np.asarray(whole.layers.down[...][2]), layer["mlp.down_proj.weight"].T)
    up = np.asarray(own["up"][2])
    np.testing.assert_array_equal(up, layer["mlp.up_proj.weight"].T)
    v_bias = np.asarray(own["v_bias"][2])
    np.testing.assert_array_equal(v_bias, layer["self_attn.v_proj.bias"].reshape(n, 1, h))
    embed = np.asarray(whole.embed[...])
    np.testing.assert_array_equal(embed[: CASE["vocab_size"]], w["model.embed_tokens.weight"])
    assert not embed[CASE["vocab_size"] :].any()


@pytest.mark.mesh
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_loading_on_any_mesh_splits_the_same_weights(shape, wide_folder):
    whole = load_model(wide_folder)
    with jax.set_mesh(make_mesh(**shape)):
        model = load_model(wide_folder)
    assert_equal(model, whole)
    parts = shape.get("fsdp", 1) * shape.get("tensor", 1)
    matrices = [w for name, w in vars(model.layers).items() if name in ("qkv", "o", "gate_up", "down")]
    assert len(matrices) == 4
    for w in [*matrices, model.embed, *([] if model.head is None else [model.head])]:
        assert {shard.data.nbytes for shard in w[...].addressable_shards} == {w.nbytes // parts}


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_every_row_is_read_once(shape, wide_folder, monkeypatch):
    read: dict[str, np.ndarray] = {}
    fill = TensorInFile.fill

    def counted(self, out, start):
        rows = read.setdefault(self.name, np.zeros(self.shape[0], int))
        rows[start : start + out.shape[0]] += 1
        fill(self, out, start)

    monkeypatch.setattr(TensorInFile, "fill", counted)
    with jax.set_mesh(make_mesh(**shape)):
        load_model(wide_folder)
    assert read.keys() == hf_shapes(WIDE).keys()
    for name, rows in read.items():
        assert (rows == 1).all(), (name, rows)


@pytest.mark.slow
def test_host_memory_peaks_near_one_layer(tmp_path, monkeypatch):
    """tracemalloc sees numpy's memory, not XLA's; but a CPU device keeps the embedding's pieces as they are."""
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 24, "vocab_size": 4096}
    config = LLAMA | sizes | {"tie_word_embeddings": True}
    tensors = weights(config)
    layer = sum(x.nbytes for name, x in tensors.items() if name.startswith("model.layers.0."))
    embed = tensors["model.embed_tokens.weight"]
    total = sum(x.nbytes for x in tensors.values())
    folder = write_folder(tmp_path, config, tensors)
    load_model(folder)  # this call compiles

    reads = []
    fill = TensorInFile.fill
    monkeypatch.setattr(
        TensorInFile, "fill", lambda self, out, start: (reads.append(out.nbytes), fill(self, out, start))
    )
    tracemalloc.start()
    model = load_model(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert max(reads) <= layer < embed.nbytes
    assert peak < embed.nbytes + 1.5 * layer < total / 6
    np.testing.assert_array_equal(np.asarray(model.embed[...]), embed)


TWO_PROCESSES = """
import sys, jax
jax.distributed.initialize(sys.argv[2], num_processes=2, process_id=int(sys.argv[1]))
import numpy as np
from kvjax.mesh import make_mesh
from kvjax.models import load_model, save_model
from kvjax.models.tensor_files import TensorInFile
read = 0
fill = TensorInFile.fill
def counted(self, out, start):
    global read
    read += max(min(out.shape[0], self.shape[0] - start), 0) * out[0].nbytes
    fill(self, out, start)
TensorInFile.fill = counted
with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
    model = load_model(sys.argv[3])
    save_model(model, sys.argv[4])
# not printed: Gloo writes to stdout as well
open(f"{sys.argv[4]}.read{sys.argv[1]}", "w").write(str(read))
"""


@pytest.mark.slow
def test_two_processes_read_half_each_and_save_one_folder(wide_folder, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    env = os.environ | {"JAX_NUM_CPU_DEVICES": "4", "PYTHONPATH": str(ROOT)}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, str(i), address, str(wide_folder), str(tmp_path / "out")],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    outputs = [run.communicate(timeout=120) for run in runs]
    assert all(run.returncode == 0 for run in runs), outputs
    read = [int((tmp_path / f"out.read{i}").read_text()) for i in range(2)]
    total = sum(x.nbytes for x in weights(WIDE).values())
    assert sum(read) == total
    assert max(read) < 0.6 * total
    assert_equal(load_model(tmp_path / "out"), load_model(wide_folder))


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_dtype_defaults_to_the_files_and_can_be_set(stored, tmp_path):
    tensors = {name: x.astype(stored) for name, x in weights(LLAMA).items()}
    folder = write_folder(tmp_path, LLAMA, tensors)
    model = load_model(folder)
    assert {w.dtype for w in jax.tree.leaves(model)} == {np.dtype(stored)}
    gate = tensors["model.layers.1.mlp.gate_proj.weight"].T
    np.testing.assert_array_equal(np.asarray(model.unfused_arrays()["layers.gate.value"].value[1]), gate)
    for asked in ("bfloat16", jnp.float32):
        cast = load_model(folder, asked)
        assert {w.dtype for w in jax.tree.leaves(cast)} == {jnp.dtype(asked)}
        np.testing.assert_array_equal(
            np.asarray(cast.unfused_arrays()["layers.gate.value"].value[1]),
            np.asarray(jnp.asarray(gate).astype(asked)),
        )


def split_files(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    """Rewrite a folder's weights as two files and an index."""
    (folder / "model.safetensors").unlink()
    names = list(tensors)
    files = {"a.safetensors": names[: len(names) // 2], "b.safetensors": names[len(names) // 2 :]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_sharded_files_are_loaded(tmp_path, whole):
    folder = split_files(write_folder(tmp_path, CASE), weights(CASE))
    assert_equal(load_model(folder), whole)
    (folder / "b.safetensors").unlink()
    with pytest.raises(UserError, match=r"index\.json names b\.safetensors, not in the folder"):
        load_model(folder)
    # as in transformers, a single file has precedence over an index, whichever is newer
    write_folder(folder, CASE)
    with pytest.warns(
        UserWarning, match=r"model\.safetensors is read, .* model\.safetensors\.index\.json is ignored"
    ):
        assert_equal(load_model(folder), whole)


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/../../x", "x" * 5000, "a\0b", "", 5, ["x"]], ids=repr
)
def test_index_that_names_files_outside_the_folder_is_refused(name, tmp_path):
    folder = split_files(write_folder(tmp_path, CASE), weights(CASE))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"norm.weight": name}}))
    assert len(error(folder).removeprefix(str(tmp_path))) < 200


def test_tensor_in_two_files_is_refused(tmp_path):
    folder = split_files(write_folder(tmp_path, CASE), weights(CASE))
    shutil.copy(folder / "a.safetensors", folder / "b.safetensors")
    assert re.search(r"is stored twice, in a\.safetensors, b\.safetensors$", error(folder))


TIED = LLAMA | {"tie_word_embeddings": True}
EMBED, HEAD, DOWN = "model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.down_proj.weight"
ROTARY = "model.layers.0.self_attn.rotary_emb.inv_freq"


def frequencies(theta: float = 10_000.0) -> np.ndarray:
    """Return the rotary frequencies of `LLAMA`, whose heads have 12 dimensions."""
    return (theta ** -(np.arange(0, 12, 2) / 12)).astype(np.float32)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_redundant_tensors_are_skipped(dtype, tmp_path):
    tensors = weights(TIED)
    tensors[EMBED] = tensors[EMBED].astype(dtype).astype(np.float32)
    extras = {ROTARY: frequencies().astype(dtype), HEAD: tensors[EMBED].astype(dtype)}
    model = load_model(write_folder(tmp_path, TIED, tensors | extras))
    assert model.head is None
    assert model.config.tied


@pytest.mark.parametrize(
    "table",
    [frequencies(10_100), frequencies()[:5], frequencies() * np.nan, frequencies().astype(np.float64)],
)
def test_rotary_frequencies_of_another_model_are_refused(table, tmp_path):
    folder = write_folder(tmp_path, LLAMA, weights(LLAMA) | {ROTARY: table})
    assert f"{ROTARY} are not the rotary frequencies of the config" in error(folder)


@pytest.mark.parametrize("shape", [{}, {"fsdp": 4, "tensor": 2}], ids=str)
def test_head_that_differs_from_the_embedding_is_used_despite_tying(shape, tmp_path):
    tensors = weights(TIED)
    tensors[HEAD] = tensors[EMBED].copy()
    tensors[HEAD][-1, -1] += 1
    folder = write_folder(tmp_path / "from", TIED, tensors)
    with (
        jax.set_mesh(make_mesh(**shape)),
        pytest.warns(UserWarning, match=r"lm_head\.weight are not the embedding"),
    ):
        model = load_model(folder)
    assert model.head is not None
    np.testing.assert_array_equal(np.asarray(model.head[...])[: TIED["vocab_size"]], tensors[HEAD])
    np.testing.assert_array_equal(np.asarray(model.embed[...])[: TIED["vocab_size"]], tensors[EMBED])
    save_model(model, tmp_path / "to")
    assert json.loads((tmp_path / "to" / "config.json").read_text())["tie_word_embeddings"] is False


def test_tied_model_may_store_only_its_head(tmp_path):
    tensors = weights(TIED)
    stored = {HEAD if name == EMBED else name: x for name, x in tensors.items()}
    model = load_model(write_folder(tmp_path, TIED, stored))
    np.testing.assert_array_equal(np.asarray(model.embed[...])[: TIED["vocab_size"]], tensors[EMBED])


def test_untied_model_without_a_head_is_refused(tmp_path):
    tensors = weights(LLAMA)
    del tensors[HEAD]
    assert "the output head (lm_head.weight) is missing" in error(write_folder(tmp_path, LLAMA, tensors))


@pytest.mark.parametrize(
    "renamed",
    [
        lambda name: name.removeprefix("model."),
        lambda name: name.replace("model.layers.1", "layers.1"),
        lambda name: f"model.{name}",
    ],
    ids=["without the prefix", "some without it", "with it twice"],
)
def test_names_with_and_without_the_prefix_are_read(renamed, tmp_path, whole):
    tensors = {renamed(name): x for name, x in weights(CASE).items()}
    assert_equal(load_model(write_folder(tmp_path, CASE, tensors)), whole)


@pytest.mark.parametrize("where", ["language_model.", "model.language_model."])
def test_text_model_of_a_multimodal_model_is_loaded(where, tmp_path):
    """The names are those of transformers 4 and 5."""
    own = weights(GEMMA3)
    below = where.startswith("model.")
    tensors = {f"{where}{name.removeprefix('model.') if below else name}": x for name, x in own.items()}
    outer = where.removesuffix("language_model.")
    tensors |= {
        f"{outer}{name}": np.ones(3, np.float32) for name in ("vision_tower.x", "multi_modal_projector.y")
    }
    whole = {"model_type": "gemma3", "text_config": GEMMA3}
    found = load_model(write_folder(tmp_path / "multimodal", whole, tensors))
    assert_equal(found, load_model(write_folder(tmp_path / "text", GEMMA3)))
    # the model has a head of its own, as the outer config says
    head = f"{outer}lm_head.weight" if below else "language_model.lm_head.weight"
    untied = whole | {"tie_word_embeddings": False}
    tensors[head] = -own["model.embed_tokens.weight"]
    with_head = load_model(write_folder(tmp_path / "untied", untied, tensors))
    np.testing.assert_array_equal(with_head.head[...][:61], tensors[head])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [DOWN, EMBED, "model.norm.weight"])
def test_tensors_with_nan_or_infinity_are_refused_by_name(name, value, tmp_path):
    tensors = weights(LLAMA)
    tensors[name].flat[-1] = value
    assert error(write_folder(tmp_path, LLAMA, tensors)).endswith(f": NaN or infinite numbers in {name}")


def test_overflowing_cast_is_refused(tmp_path):
    tensors = weights(LLAMA)
    tensors[DOWN][3, 4] = 7e4
    folder = write_folder(tmp_path, LLAMA, tensors)
    message = error(folder, "float16")
    assert f"{DOWN} has numbers beyond 65,504, the largest of float16: use bfloat16" in message
    assert load_model(folder, "bfloat16").config.num_layers == 3


def test_wrong_tensors_are_summarised_in_one_message(tmp_path):
    tensors = weights(LLAMA)
    tensors = {name: x for name, x in tensors.items() if "layers.1.mlp" not in name}
    tensors["model.layers.3.mlp.up_proj.weight"] = np.ones((80, 48), np.float32)
    tensors["model.layers.0.self_attn.q_norm.weight"] = np.ones(12, np.float32)
    tensors["model.layers.2.self_attn.k_proj.weight"] = np.ones((48, 48), np.float32)
    tensors["model.norm.weight"] = np.ones(48, np.int8)
    message = error(write_folder(tmp_path, LLAMA, tensors))
    assert message.startswith(str(tmp_path))
    missing, *parts = message.split("; ")[1:]
    assert re.fullmatch(r"missing: (model\.layers\.1\.mlp\.\w+\.weight(, )?){2} and 1 more", missing)
    assert sorted(parts[0].removeprefix("unexpected: ").split(", ")) == [
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.3.mlp.up_proj.weight",
    ]
    assert parts[1] == "misshapen: model.layers.2.self_attn.k_proj.weight is (48, 48), expected (24, 48)"
    assert parts[2] == "of an unsupported dtype: model.norm.weight is I8"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.0.mlp.up_proj.g_idx", "GPTQ"),
        ("model.layers.0.mlp.up_proj.qweight", "AWQ"),
        ("model.layers.0.mlp.up_proj.weight.absmax", "bitsandbytes"),
        ("model.layers.0.mlp.up_proj.weight_scale", "FP8"),
        ("model.layers.0.self_attn.k_scale", "FP8"),
        ("language_model.model.norm.weight", "multimodal"),
        ("model.layers.0.mlp.experts.0.up_proj.weight", "experts"),
        ("layers.0.attention.wq.weight", "Meta"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", "adapter"),
        ("score.weight", "classifier"),
    ],
)
def test_unsupported_weights_are_named_by_kind(name, kind, tmp_path):
    message = error(write_folder(tmp_path, LLAMA, weights(LLAMA) | {name: np.ones(4, np.float32)}))
    assert kind in message
    assert message.endswith(f"({name}), expected the plain weights of a llama model")


@pytest.mark.parametrize(
    ("layers", "line"),
    [
        (10_000, "the config has 10,000 layers, but the weights only 30 tensors"),
        (10**9, "num_layers must be at least 1 and at most 10,000"),
        (2**63, "num_hidden_layers must be a whole number of 64 bits"),
    ],
)
def test_more_layers_than_tensors_are_refused(layers, line, tmp_path):
    folder = write_folder(tmp_path, LLAMA)
    (folder / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": layers}))
    assert line in error(folder)


def test_folders_without_a_model_are_refused(tmp_path):
    assert error(tmp_path / "nowhere") == f"{tmp_path / 'nowhere'}: no such folder"
    assert "it has no config.json" in error(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert "no weights, expected model.safetensors or" in error(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "(pytorch_model.bin: only safetensors are read from a folder)" in error(tmp_path)
    assert "is a file; pass the folder" in error(tmp_path / "config.json")


@pytest.mark.parametrize("config", [True, False], ids=["config", "no config"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("consolidated.00.pth", "Meta's or Mistral's own layout"),
        ("params.json", "Meta's or Mistral's own layout"),
        ("manifest.ocdbt", "an Orbax checkpoint; kvjax reads only those that python -m kvjax.convert"),
        ("0/items/_METADATA", "a folder of Orbax checkpoints"),
        ("orbax/_METADATA", "an Orbax export of kvjax: python -m kvjax.convert writes it"),
        ("model-00001-of-00002.safetensors", "shards without model.safetensors.index.json"),
        ("gates.safetensors", "gates, which belong to --gates"),
        ("checkpoint-5/config.json", "a folder of model folders"),
    ],
)
def test_unsupported_folders_are_named_by_kind(name, kind, config, tmp_path):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).touch()
    if config:
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert kind in error(tmp_path)


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody-of-this-name/model"])
def test_impossible_paths_are_refused(name):
    assert error(name).endswith(": no such folder")


def test_hub_id_is_fetched_into_a_folder(folder, whole, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda hub_id, **_: str(folder))
    assert_equal(load_model("some-owner/some-model"), whole)


def test_axis_that_does_not_divide_is_refused(folder):
    with jax.set_mesh(make_mesh(tensor=4)):
        assert "tensor axis has size 4, which does not divide the model's kv heads (6)" in error(folder)


def test_unknown_dtype_is_refused(folder):
    assert error(folder, "float8") == "dtype 'float8' is not supported, only float32, float16, bfloat16"


def test_loading_needs_no_mesh_and_sets_none(whole):
    assert jax.sharding.get_abstract_mesh().empty
    with use_mesh(whole):
        assert jax.sharding.get_abstract_mesh().size == 1
