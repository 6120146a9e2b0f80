"""Reading Hugging Face folders: sharding, what is read, what is held, and what is said when it cannot be read."""

import json
import os
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
from kvjax.models import load_model
from kvjax.models.tensor_files import TensorInFile
from tests.models.cases import CASES, LLAMA, hf_shapes, weights, write_folder
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


def test_every_tensor_stands_where_it_belongs(folder, whole):
    w = weights(CASE)
    layer = {name.removeprefix("model.layers.2."): x for name, x in w.items()}
    d, n, h = 48, 6, 16
    q = np.asarray(whole.layers.q[...][2])
    np.testing.assert_array_equal(q, layer["self_attn.q_proj.weight"].T.reshape(d, n, h))
    o = np.asarray(whole.layers.o[...][2])
    np.testing.assert_array_equal(o, layer["self_attn.o_proj.weight"].T.reshape(n, h, d))
    np.testing.assert_array_equal(np.asarray(whole.layers.down[...][2]), layer["mlp.down_proj.weight"].T)
    v_bias = np.asarray(whole.layers.v_bias[...][2])
    np.testing.assert_array_equal(v_bias, layer["self_attn.v_proj.bias"].reshape(n, 1, h))
    embed = np.asarray(whole.embed[...])
    np.testing.assert_array_equal(embed[: CASE["vocab_size"]], w["model.embed_tokens.weight"])
    assert not embed[CASE["vocab_size"] :].any()


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_any_mesh_loads_the_same_model_its_weights_split(shape, wide_folder):
    whole = load_model(wide_folder)
    with jax.set_mesh(make_mesh(**shape)):
        model = load_model(wide_folder)
    assert_equal(model, whole)
    parts = shape.get("fsdp", 1) * shape.get("tensor", 1)
    matrices = [
        w for name, w in vars(model.layers).items() if name in ("q", "k", "v", "o", "gate", "up", "down")
    ]
    assert len(matrices) == 7
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


def test_the_host_holds_about_a_layer(tmp_path, monkeypatch):
    """tracemalloc sees numpy's memory, not XLA's; but a CPU device keeps the embedding's pieces as they are."""
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 24, "vocab_size": 4096}
    config = LLAMA | sizes | {"tie_word_embeddings": True}
    tensors = weights(config)
    layer = sum(x.nbytes for name, x in tensors.items() if name.startswith("model.layers.0."))
    embed = tensors["model.embed_tokens.weight"]
    total = sum(x.nbytes for x in tensors.values())
    folder = write_folder(tmp_path, config, tensors)
    load_model(folder)  # compiles

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
def test_dtypes_of_files_and_of_models(stored, tmp_path):
    tensors = {name: x.astype(stored) for name, x in weights(LLAMA).items()}
    folder = write_folder(tmp_path, LLAMA, tensors)
    model = load_model(folder)
    assert {w.dtype for w in jax.tree.leaves(model)} == {np.dtype(stored)}
    gate = tensors["model.layers.1.mlp.gate_proj.weight"].T
    np.testing.assert_array_equal(np.asarray(model.layers.gate[...][1]), gate)
    for asked in ("bfloat16", jnp.float32):
        cast = load_model(folder, asked)
        assert {w.dtype for w in jax.tree.leaves(cast)} == {jnp.dtype(asked)}
        np.testing.assert_array_equal(
            np.asarray(cast.layers.gate[...][1]), np.asarray(jnp.asarray(gate).astype(asked))
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


def test_sharded_files(tmp_path, whole):
    folder = split_files(write_folder(tmp_path, CASE), weights(CASE))
    assert_equal(load_model(folder), whole)
    (folder / "b.safetensors").unlink()
    with pytest.raises(UserError, match=r"index\.json names b\.safetensors, not in the folder"):
        load_model(folder)


def test_harmless_extras_are_ignored(tmp_path):
    config = LLAMA | {"tie_word_embeddings": True}
    tensors = weights(config)
    extras = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(6, np.float32),
        "lm_head.weight": tensors["model.embed_tokens.weight"],
    }
    assert load_model(write_folder(tmp_path, config, tensors | extras)).head is None


def test_all_wrong_tensors_are_named_at_once(tmp_path):
    tensors = weights(LLAMA)
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["lm_head.weight"]
    tensors["model.layers.3.mlp.up_proj.weight"] = np.ones((80, 48), np.float32)
    tensors["model.layers.0.self_attn.q_norm.weight"] = np.ones(12, np.float32)
    tensors["model.layers.2.self_attn.k_proj.weight"] = np.ones((48, 48), np.float32)
    tensors["model.norm.weight"] = np.ones(48, np.int8)
    message = error(write_folder(tmp_path, LLAMA, tensors))
    assert message.startswith(str(tmp_path))
    parts = message.split("; ")[1:]
    assert sorted(parts[0].removeprefix("missing: ").split(", ")) == [
        "lm_head.weight",
        "model.layers.1.mlp.up_proj.weight",
    ]
    assert sorted(parts[1].removeprefix("unexpected: ").split(", ")) == [
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.3.mlp.up_proj.weight",
    ]
    assert parts[2] == "misshapen: model.layers.2.self_attn.k_proj.weight is (48, 48), expected (24, 48)"
    assert parts[3] == "of an unsupported dtype: model.norm.weight is I8"


def test_folders_that_are_none(tmp_path, monkeypatch):
    assert error(tmp_path / "nowhere") == f"{tmp_path / 'nowhere'}: no such folder"
    assert "it has no config.json" in error(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert "no weights, expected model.safetensors or" in error(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "(pytorch_model.bin: only safetensors are read from a folder)" in error(tmp_path)
    assert "is a file; pass the folder" in error(tmp_path / "config.json")


def test_a_hub_id_is_fetched_into_a_folder(folder, whole, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda hub_id, **_: str(folder))
    assert_equal(load_model("some-owner/some-model"), whole)


def test_an_axis_that_does_not_divide_is_refused_before_anything_is_read(folder):
    with jax.set_mesh(make_mesh(tensor=4)):
        assert "tensor axis has size 4, which does not divide the model's kv heads (6)" in error(folder)


def test_an_unknown_dtype(folder):
    assert error(folder, "float8") == "dtype 'float8' is not supported, only float32, float16, bfloat16"


def test_loading_needs_no_mesh_and_leaves_none(folder, whole):
    assert jax.sharding.get_abstract_mesh().empty
    with use_mesh(whole):
        assert jax.sharding.get_abstract_mesh().size == 1
